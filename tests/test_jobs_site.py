"""What a site file can say: its words, its variables, its neighbours; and the jobs that go wrong because of it."""

import dataclasses
import functools
import os
import shlex
import sys
from types import SimpleNamespace

import pytest
import worker_jobs
from worker_jobs import options, ran, stand_in

from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, check, load_site, render, slurm, slurm_job, submit
from mpdemo.jobs.site import find_site
from mpdemo.tools.explain.findings import report
from mpdemo.tools.support import site_trial
from mpdemo.tools.support.site_trial import try_site

spec = functools.partial(worker_jobs.spec, gpus_per_process=0)


def script(*directives, setup=()):
    """Return the throw-away cluster's script with more directives and commands."""
    text = load_site("throwaway").text
    end = "#SBATCH --no-requeue"
    text = text.replace(end, "\n".join([*(f"#SBATCH {text}" for text in directives), end]))
    return text.replace("{course}\n", "\n".join(["{course}", "", *setup, ""]))


def site(*directives, setup=(), text="", **facts):
    return dataclasses.replace(
        load_site("throwaway"), text=text or script(*directives, setup=setup), **facts
    )


def write_site(project, name, facts="", *directives):
    """Write a site file: the throw-away cluster's script with other facts."""
    lines = [line for line in script(*directives).splitlines() if not line.startswith("#:")]
    lines[1:1] = [f"#: {fact}" for fact in facts.splitlines()]
    (project / f"slurm/sites/{name}.sbatch").write_text("\n".join(lines) + "\n")


# --- a setup line that fails, a Python that is missing: on a real Slurm


def test_a_setup_line_that_fails_ends_the_job_and_is_named(cluster, project):
    lines = ("export IT='went well'  # a comment", "module load nowhere", "touch too-far")
    job = submit(spec(), site=site(setup=lines))
    with pytest.raises(JobFailed, match="setup line failed with exit status 127: module load nowhere"):
        job.result(60)
    assert "rank 0" not in job.log() and not (project / "too-far").exists()
    assert (project / "runs/toy/exit-status.txt").read_text() == f"{job.id} 1\n"


def test_setup_lines_may_use_what_is_not_set_and_functions_that_fail_inside(cluster, project):
    """As `module` and `conda activate` do: only the status of the line counts."""
    (project / "activate.sh").write_text(
        'false\nthing() { false; [ -z "$UNSET" ]; }\nthing\nexport FOUND=$1yes\n'
    )
    setup = ("# ours", "source ./activate.sh", 'test "$FOUND" = yes', "false || true")
    ran(spec("train"), site=site(setup=setup))


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_that_finds_no_python_says_so(cluster, project, launcher):
    job = submit(spec(launcher=launcher), site=site(python="no-such-python"))
    with pytest.raises(
        JobFailed, match="(?s)its last lines:.*no-such-python.*what it may be: mpdemo explain runs/toy"
    ):
        job.result(timeout=60)
    assert "there is no program 'no-such-python' on the compute node" in report(job.log())


def test_the_words_of_a_launch_reach_every_task(cluster, project):
    """Python behind a prefix, more options of srun, a login shell."""
    facts = {
        "python": f"env PREFIX=there {sys.executable}",
        "srun_options": ("--export=ALL", "--cpu-bind=none"),
    }
    code = "import os; print(*(os.environ[name] for name in ('PREFIX', 'SLURM_LOCALID')))"
    text = script().replace("#!/bin/bash", "#!/bin/bash -l")
    job = ran(spec(command=("-c", code), processes_per_node=2), site=site(text=text, **facts))
    # it cannot bind here
    printed = [line for line in job.log().splitlines() if not line.startswith("srun: ")]
    assert sorted(printed) == ["0: there 0", "1: there 1"]


# --- the words in the text


def test_a_directive_stays_as_it_is_and_one_of_gpus_goes_with_them():
    mine = site('--licenses="a b"', "--mem-per-gpu=60G", "--exclusive")
    given = options(render(spec(), mine))
    assert given["licenses"] == "a b" and "exclusive" in given and not {"mem-per-gpu", "gres"} & set(given)
    given = options(render(spec(gpus_per_process=1), mine))
    assert (given["mem-per-gpu"], given["gres"]) == ("60G", "gpu:4")  # all of a node that is not shared


def test_a_job_gets_no_more_cores_than_it_may():
    mine = site(cores_per_node=64, gpus_per_node=8, cores_per_job=20)
    for processes, cores in ((1, 8), (2, 8), (4, 5), (8, 2)):
        given = options(render(spec(processes_per_node=processes, gpus_per_process=1), mine))
        assert given["cpus-per-task"] == str(cores)


def test_a_command_over_several_lines_stays_as_it_is(cluster, project):
    """Each line by itself would be none."""
    setup = ("if true; then", "  export FOUND=yes", "fi", "ours() {", "  false", "}", 'test "$FOUND" = yes')
    text = render(spec(), site(setup=setup))
    assert "\n".join(setup[:-1]) + "\n" in text and '"$FOUND" = yes || failed ' in text
    assert check(text, "throwaway", ask_slurm=False) == []


@pytest.mark.parametrize(
    ("words", "shape", "needed"),
    [
        ({"srun_options": ("--gpus-per-task=1",)}, {"gpus_per_process": 2}, "2"),
        ({"srun_options": ("--gpus-per-task=1",)}, {"launcher": "torchrun", "processes_per_node": 4}, "4"),
        ({"directives": ("--gpu-bind=single:1",)}, {"gpus_per_process": 2}, "2"),
        ({"srun_options": ("--gpu-bind=per_task:1",)}, {"gpus_per_process": 2}, "2"),
        ({"srun_options": ("--ntasks-per-node=4",)}, {"processes_per_node": 2}, "2"),
        ({"directives": ("--ntasks=4",)}, {"processes_per_node": 2}, "2"),
        (
            {"srun_options": ("--gpus-per-task=1", "--ntasks=2", "--mpi=none")},
            {"processes_per_node": 2},
            "",
        ),
        (
            {"srun_options": ("--gpu-bind=per_task:1",)},
            {"launcher": "torchrun", "processes_per_node": 4},
            "",
        ),
        ({"text": "without gres"}, {"processes_per_node": 5}, "at most|more nodes"),
    ],
    ids=str,
)
def test_options_for_every_job_are_compared_with_this_one(words, shape, needed):
    """A process that drives two GPUs would see one."""
    if "text" in words:
        words = {"text": "\n".join(line for line in script().splitlines() if "--gres" not in line)}
    found = check(
        spec(**{"gpus_per_process": 1} | shape),
        site(*words.pop("directives", ()), **words),
        ask_slurm=False,
    )
    if not needed:
        assert found == []
    elif "text" in words:
        assert found[0].message == "5 GPUs per node, but a node has 4"
    else:
        assert found[0].message.endswith(f"holds for every job; this one needs {needed} there")


def test_the_file_says_which_pytorch_the_site_has(project):
    old, new = (try_site(site(pytorch=text), None)[-1] for text in ("2.9.1", "2.99"))
    assert not old.ok and "its file says that its PyTorch is 2.9.1; allowed: >=2." in old.text
    assert new.ok and new.text.endswith("its PyTorch is 2.99")


def test_under_torchrun_no_task_is_bound_and_the_prefix_stands_in_the_quotes():
    words = {"srun_options": ("--cpu-bind=cores",), "python": "run 'my image' python"}
    text = render(spec(launcher="torchrun", nodes=2), site(**words))
    assert "--cpu-bind" not in text
    assert r"exec run '\''my image'\'' python -m torch.distributed.run" in text
    assert check(text, "throwaway", ask_slurm=False) == []


def test_on_nodes_of_one_gpu_each_process_gets_a_node(project):
    small = site(gpus_per_node=1, cores_per_node=8)
    given = options(render(spec(processes_per_node=2, gpus_per_process=1), small))
    assert (given["nodes"], given["ntasks-per-node"], given["gres"], given["cpus-per-task"]) == (
        "2",
        "1",
        "gpu:1",
        "8",
    )
    assert check(spec(processes_per_node=2, gpus_per_process=1), small, ask_slurm=False) == []
    assert "2 GPUs per node" in check(spec(gpus_per_process=2), small, ask_slurm=False)[0].message


# --- constraints, variables, neighbours


def test_variables_of_directives_are_expanded_and_a_missing_one_is_named(project, monkeypatch):
    write_site(
        project, "mine", "", "--account=$COURSE_ACCOUNT", "--reservation=${DAY}_a", "--mail-user=$ME # $YOU"
    )
    for name, value in (("COURSE_ACCOUNT", "abc@v100"), ("DAY", "monday"), ("ME", "me@x.org")):
        monkeypatch.setenv(name, value)
    given = options(render(spec(), load_site("mine")))
    assert (given["account"], given["reservation"], given["mail-user"]) == (
        "abc@v100",
        "monday_a",
        "me@x.org",
    )
    monkeypatch.delenv("COURSE_ACCOUNT")
    with pytest.raises(
        UserError, match=r"mine.sbatch: #SBATCH --account=\$COURSE_ACCOUNT: a variable is not set; do"
    ):
        load_site("mine")


def test_a_site_file_of_before_gets_its_line(project):
    (project / "slurm/sites/mine.toml").write_text('partition = "gpu"\n')
    with pytest.raises(UserError, match="no site 'mine'; .*; a .toml file is of an earlier version: write"):
        load_site("mine")


def test_a_job_of_another_cluster_is_asked_there(project, monkeypatch):
    """As sbatch answers where a script says --clusters: the number and the cluster's name."""
    waits, runs = "CLUSTER: alex\n7|PENDING|0:00|Priority", "JobId=7 UserId=a JobState=RUNNING ExitCode=0:0"
    clients = {"sbatch": "7;alex", "squeue": waits, "scontrol": runs, "scancel": ""}
    for name, said in clients.items():
        stand_in(project / "bin" / name, f"echo {name} $* >> {project}/asked\necho '{said}'")
    monkeypatch.setenv("PATH", f"{project}/bin:/usr/bin:/bin")
    number = slurm_job.start(spec(), "toy.sbatch", "home x")["id"]
    job = SimpleNamespace(id=number, record={"identity": "home x"})
    # asked once
    assert slurm_job.own_job(job, 9)[0].reason == slurm_job.own_job(job, 9)[0].reason == "Priority"
    assert slurm_job.look_up(number).state == "running"
    slurm.client("scancel", number)
    squeue, *asked = (project / "asked").read_text().splitlines()[1:]
    assert squeue.endswith(" --clusters=alex")
    assert asked == ["scontrol --clusters=alex show job -o 7", "scancel --clusters=alex 7"]
    assert slurm.number(number) == "7"


def test_another_batch_system_is_named(tmp_path, monkeypatch):
    stand_in(tmp_path / "bsub", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.none_in_reach() == "LSF (bsub) is here, but this course speaks Slurm"


def test_a_bad_neighbour_is_named_and_stops_nobody(cluster, project, capsys):
    write_site(project, "bad", "gpus_per_nod = 4")
    write_site(project, "poor", 'cluster_names = ["elsewhere"]', "--account=$NOT_SET")
    assert find_site() == "throwaway" and load_site().name == "throwaway"
    # in all
    assert capsys.readouterr().err.count("skipped: site file bad.sbatch: unknown name 'gpus_per_nod'") == 1
    with pytest.raises(UserError, match="bad.sbatch"):
        load_site("bad")


def test_slurms_own_variables_of_the_environment_count_and_are_named(cluster, project, monkeypatch, capsys):
    monkeypatch.setenv("SBATCH_ACCOUNT", "course")
    job = submit(spec("train"))
    assert "with SBATCH_ACCOUNT=course of the environment" in " ".join(capsys.readouterr().out.split())
    assert "Account=course" in slurm.client("scontrol", "show", "job", job.id)
    assert job.wait(60) == "done"
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    assert "invalid partition specified: nowhere" in check(spec(), "generic")[0].message


# --- tried, as far as a login node can


def findings(*directives, **words):
    return try_site(
        dataclasses.replace(site(*directives, **words), name="mine", cluster_names=()), "throwaway"
    )


def test_slurm_is_asked_about_any_site_that_is_named(cluster, project):
    (job,) = findings("--partition=moon")
    assert not job.ok and "invalid partition specified: moon" in job.text
    assert "this cluster is called 'throwaway', which is not in its cluster_names" in job.text
    (job,) = findings()
    assert job.ok and "not in its cluster_names" in job.text  # so it is not found by itself
    (job,) = findings(text=script().replace("gpu:{gpus}", "gpu:h100:{gpus}"))
    assert not job.ok and "Likely cause" in job.text


def test_the_setup_lines_and_the_python_of_a_site_are_tried(cluster, project):
    (project / "torch.py").write_text(
        "import types\n__version__ = '99'\ncuda = types.SimpleNamespace(device_count=lambda: 4)\n"
    )
    setup = ("echo loading", f"export PYTHONPATH={shlex.quote(str(project))}")
    finding = findings(setup=setup, python=sys.executable)[-1]
    there = f"site mine: its Python is {sys.executable}, which sees 4 GPUs here, and its PyTorch is 99"
    assert finding.ok and finding.text == there
    finding = findings(setup=("true", "module load nowhere", "echo went on >&2"))[-1]
    assert not finding.ok and finding.text.endswith(
        "setup line failed with exit status 127: module load nowhere"
    )
    finding = findings(python="no-such-container python")[-1]
    assert (
        not finding.ok
        and "no-such-container: command not found" in finding.text
        and "in a job" in finding.remedy
    )


def test_a_program_that_never_ends_is_not_waited_for():
    """Nor one that has left the session: it keeps the output open."""
    words, longer = ["bash", "-s"], "setsid sleep 2000 & echo $!; sleep 2000\n"  # than the test is given
    status, said = site_trial.run_bounded(words, longer, seconds=0.5)
    os.kill(int(said.split()[0]), 9)
    assert status is None and said.endswith("\n\nno end within 0.5 s")

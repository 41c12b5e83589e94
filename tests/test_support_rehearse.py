"""The jobs of the course, read back from their files; rehearsed on a real throw-away Slurm, rendered for a site."""

import contextlib
import functools
import json
import re
import signal
import sys
import time

import pytest
from project import python_path
from worker_jobs import ended, started

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, load_site, render, spec_of
from mpdemo.tools.support.rehearse import SMALL, Trial, smallest
from mpdemo.tools.support.render import hours_at_most, jobs_of_course

TRAIN = "python -m mpdemo.rungs.single --out runs/a_course"
QUICK = "import time; time.sleep({})"


def add_job(project, name, code, **changes):
    """Add a job to the course of a project; return its spec."""
    (project / f"{name}.py").write_text(code)
    values = {"command": f"python {name}.py", "name": name} | changes
    with (project / "slurm/course.toml").open("a") as course:
        print(
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
            sep="\n",
            file=course,
        )
    return spec_of(**values)


@pytest.fixture
def rehearse(cluster, project, run_mpdemo):
    """Rehearse the course of a project that a test changes, on a real Slurm."""
    environment = {"MPDEMO_ROOT": str(project), "PYTHONPATH": python_path(paths.source())}
    return functools.partial(run_mpdemo, "rehearse", timeout=200, **environment)


# --- the list of the course's jobs


def test_the_list_of_the_course_holds_its_jobs_and_a_wrong_word_is_named(project):
    jobs = jobs_of_course()
    assert len(jobs) >= 10 and {jobs["23_two"].world_size, jobs["33_layouts"].world_size} == {2, 4}
    # the folder's own list counts
    assert add_job(project, "toy", "pass", nodes=2) == jobs_of_course()["toy"]
    for words, said in (
        ("command='python -V'\nnode=2", "'node'"),
        ("nodes=", "Invalid"),
        ("", "'command'"),
    ):
        (project / "slurm/course.toml").write_text(f"[toy]\nname='a'\n{words}\n")
        with pytest.raises(UserError, match=f"course.toml .*{said}"):
            jobs_of_course()


def test_a_small_job_keeps_its_processes_and_works_in_a_folder_of_its_own():
    small = {name: smallest(name, spec) for name, spec in jobs_of_course().items()}
    for name, spec in jobs_of_course().items():
        words = " ".join(small[name].command)
        assert (small[name].nodes, small[name].world_size) == (spec.nodes, spec.world_size)
        assert small[name].out == f"runs/rehearsal/{name}" and spec.out not in words
        assert words.endswith(" ".join(SMALL)) or "labs" in words or "first_ddp.py" in words
        if "labs" in words:  # each word after the folder is a number of steps, or a function of the lab
            _, module, _, *last = small[name].command
            lab = (paths.source() / "notebooks/labs" / module.split(".")[-1]).with_suffix(".py").read_text()
            assert all(word.isdigit() or f"def {word}(" in lab for word in last)


# --- rehearse


def test_one_table_says_what_became_of_each_job(rehearse, project):
    """One of the course and another are well, one fails with a known error, one has no such nodes, one gives up."""
    add_job(project, "a_course", "", command=TRAIN)
    add_job(
        project, "a_good", QUICK.format(0), command="torchrun --standalone --nproc-per-node=2 a_good.py"
    )
    add_job(project, "b_broken", "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')")
    add_job(project, "c_large", QUICK.format(0), nodes=9)
    add_job(project, "d_refused", "print('mpdemo: error: no such thing; do: another'); raise SystemExit(2)")
    done = rehearse("--only", "a_course,a_good,b_broken,c_large,d_refused", "--at-once", "3")
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if re.match("[a-d]_.* {3}", line)}
    assert done.returncode == 1 and rows, done.stdout + done.stderr
    assert rows["a_course"].endswith("nothing"), done.stdout
    assert rows["a_good"].endswith("nothing")
    assert "smaller batch" in rows["b_broken"] and "Likely cause" in rows["c_large"]
    assert "mpdemo: error: no such thing; do: another" in rows["d_refused"]
    assert "2 of 5 jobs went well." in done.stdout and "cancelled" not in done.stdout
    assert "mpdemo explain runs/rehearsal/b_broken/slurm-" in done.stdout


@pytest.mark.nightly
def test_the_last_job_says_where_the_ranks_are(rehearse, project):
    add_job(project, "toy", "pass", nodes=2)
    done = rehearse("--only", "env")
    assert done.returncode == 0 and "[OK]   one row per rank" in done.stdout, done.stdout + done.stderr
    ranks = [line.split() for line in done.stdout.splitlines() if re.match(r"[01] +node", line)]
    assert [rank[1] for rank in ranks] == ["node1", "node2"], done.stdout


def test_time_that_is_over_and_ctrl_c_cancel_what_was_submitted_and_say_so(rehearse, project):
    for name in ("a_long", "b_long", "c_long", "d_long"):
        add_job(project, name, QUICK.format(600))
    text = (project / "slurm/sites/throwaway.sbatch").read_text()
    # a job that does not start
    held = text.replace("#SBATCH --no-requeue", "#SBATCH --no-requeue\n#SBATCH --hold")
    (project / "never.sbatch").write_text(held)
    only = ("--only", "a_long,b_long", "--site", str(project / "never.sbatch"))
    late = rehearse(*only, "--wait", "2", "--at-once", "1")
    assert late.returncode == 1 and "0 of 2 jobs went well." in late.stdout, late.stderr
    assert re.search("still pending.* after 2 s; do: a larger --wait", late.stdout)
    assert "still not submitted after 2 s" in late.stdout and re.search(
        r"cancelled job \d+ \(a_long\)", late.stdout
    )
    process = started("rehearse", "--only", "c_long,d_long")
    lines = [process.stdout.readline() for _ in range(3)]
    jobs = [line.split()[-1] for line in lines[1:]]
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    said, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
    for job, name in zip(jobs, ("c_long", "d_long"), strict=True):
        assert f"cancelled job {job} ({name})" in said
        assert ended(job) == "cancelled"


def test_jobs_are_cancelled_although_nobody_reads_it(no_slurm, project, monkeypatch):
    trials = [Trial(name, add_job(project, name, QUICK.format(600))) for name in ("a_long", "b_long")]
    for trial in trials:
        trial.start(load_site("generic"))
    with contextlib.suppress(OSError), open("/dev/full", "w") as lost:
        monkeypatch.setattr(sys, "stdout", lost)
        for trial in trials:
            trial.give_up(60)
    assert [trial.job.state for trial in trials] == ["cancelled"] * 2


def test_without_a_slurm_it_says_where_to_rehearse(no_slurm, call_mpdemo):
    done = call_mpdemo("rehearse")
    assert done.returncode == 2 and "Slurm not found; rehearse on the cluster, or" in done.stderr
    assert "no job 'nine'; allowed: 11_train" in call_mpdemo("rehearse", "--only", "nine").stderr


# --- render, and an installation without the project


def test_render_writes_every_job_file_for_a_site(project, call_mpdemo, tmp_path):
    done = call_mpdemo("render", "--site", "jeanzay", "--out", str(tmp_path / "files"))
    assert done.returncode == 0, done.stderr
    written = {file.stem: file.read_text() for file in (tmp_path / "files").glob("*.sbatch")}
    jobs, site = jobs_of_course(), load_site("jeanzay")
    assert written == {name: render(spec, site) for name, spec in jobs.items()}
    assert f"{len(jobs)} batch scripts, none with a problem" in done.stdout
    assert "GPU-hours (every job at its time limit)" in done.stdout
    done = call_mpdemo(
        "render", "--site", "jeanzay", "--out", f"{next((tmp_path / 'files').iterdir())}/slurm"
    )
    assert (
        done.returncode == 2
        and "Not a directory; do: another --out" in done.stderr
        and "Trace" not in done.stderr
    )


def test_what_a_learner_takes_at_most():
    job = JobSpec(
        name="a", command=("a.py",), out="runs/a", nodes=2, processes_per_node=3, cpus_per_process=4
    )
    assert hours_at_most([job] * 2, load_site("jeanzay")) == (2.0, "GPU")
    assert hours_at_most([job], load_site("ucr_cpu")) == (4.0, "core")


def test_render_names_what_a_site_cannot_run(call_mpdemo, tmp_path):
    text = (paths.root() / "slurm/sites/throwaway.sbatch").read_text()
    facts = '#: cores_per_node = 4\n#: gpus_per_node = 1\n#: max_time = "00:05:00"\n'
    tiny = "#!/bin/bash\n" + facts + text[text.index("#SBATCH") :]
    (tmp_path / "tiny.sbatch").write_text(tiny)
    done = call_mpdemo("render", "--site", str(tmp_path / "tiny.sbatch"), "--out", str(tmp_path / "files"))
    assert done.returncode == 1
    assert "time 00:10:00 is over the limit here, 00:05:00; do: --time=00:05:00 or less" in done.stdout

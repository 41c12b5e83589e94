"""The text of batch scripts: directives, quoting, sites; and what the checker finds in one."""

import doctest
import json
import os
import random
import socket
import subprocess

import pytest
from worker_jobs import PROGRAMS, ran

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, check, load_site, render, slurm, submit
from mpdemo.jobs import spec as job_spec

WORKER = str(PROGRAMS / "worker.py")


def spec(**changes):
    values = {
        "name": "toy",
        "command": ["-m", "mpdemo.rungs.ddp", "--out", "runs/toy"],
        "out": "runs/toy",
    }
    return JobSpec(**(values | changes))


def test_generic_and_throwaway_render_the_same_text():
    for changes in ({"launcher": "torchrun", "nodes": 2}, {"signal": "USR1@60"}):
        text, again = (render(spec(**changes), load_site(name)) for name in ("generic", "throwaway"))
        assert text == again
        assert all(" # " in line for line in text.splitlines() if line.startswith("#SBATCH"))


def test_torchrun_waits_as_long_as_the_warning_gives():
    """It would kill its processes after 30 s."""
    text = render(spec(launcher="torchrun", signal="USR2@120"), load_site("generic"))
    (line,) = (line for line in text.splitlines() if line.startswith("export PET_SIGNALS_TO_HANDLE="))
    assert line.endswith(",SIGUSR1,SIGUSR2 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120")
    assert "TORCH_ELASTIC" not in render(spec(launcher="torchrun"), load_site("generic"))


def test_the_first_node_takes_the_next_port_where_a_program_listens():
    lines = [line for line in render(spec(), load_site("generic")).splitlines() if "MASTER_PORT" in line]
    with socket.create_server(("", 0)) as server:  # both lines count from 20000
        port = server.getsockname()[1]
        script = "\n".join([*lines, 'bash -c "echo \\$MASTER_PORT"']).replace("20000", str(port))
        said = subprocess.run(
            ["bash", "-c", script], env={**os.environ, "SLURM_JOB_ID": "0"}, capture_output=True
        )
    assert port < int(said.stdout) < port + 50 and not said.stderr


@pytest.mark.parametrize(
    "text", ["it's $(touch oops) `touch oops`", '50%j; "quoted" back\\slash #hash # é✓']
)
def test_a_nasty_name_path_and_argument_arrive_as_they_are(cluster, project, text):
    """On the real Slurm: the text passes through sbatch, its file names, srun and the shell."""
    out = f"runs/{text}".replace("\\", "_")
    job = ran(spec(name=text, out=out, command=(WORKER, out, "echo", text, ""), gpus_per_process=0))
    assert json.loads((project / out / "echo.json").read_text()) == [text, ""]
    shown = slurm.client("squeue", "-h", "-t", "all", "-j", job.id, "-o", "%j")
    assert shown.rstrip("\n") == text
    assert not list(project.rglob("oops"))


SIGNS = "$HOME ${X:-y} $$ $ ${local_rank} ' \" \\ * ? [a] {a,b} ~ ! !! # %j % - -- = ^ é ✓ a 0"
PIECES = [*SIGNS.split(), " ", "  ", "$(touch oops)", "`touch oops`", "; touch oops;", "> oops", "< oops"]
PIECES += ["| tee oops", "&& touch oops"]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_random_arguments_arrive_as_they_are(cluster, project, launcher):
    """Three hundred of them in one job of the real Slurm, made of what a shell might take for its own."""
    chance = random.Random(launcher)
    texts = ["".join(chance.choices(PIECES, k=chance.randrange(7))) for _ in range(300)]
    command = (WORKER, "runs/fuzz", "echo", *texts)
    ran(spec(out="runs/fuzz", command=command, launcher=launcher, gpus_per_process=0))
    assert json.loads((project / "runs/fuzz/echo.json").read_text()) == texts
    assert not list(project.rglob("oops"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"node": 2}, "unknown name 'node'; .*; did you mean 'nodes'"),
        ({"nodes": 0}, "nodes 0 is not allowed: it should be greater than or equal to 1"),
        ({"nodes": True}, "nodes True is not allowed: it should be a valid integer"),
        ({"time_limit": "ten minutes"}, "HH:MM:SS"),
        ({"time_limit": "00:00:00"}, "no time at all"),
        ({"launcher": "mpirun"}, "srun, torchrun"),
        ({"signal": "KILL@10"}, "signal 'KILL@10' is not allowed: .*USR1"),
        ({"signal": "USR1@600"}, "before the start"),
        ({"out": "/tmp/x"}, "below the project"),
        ({"out": "runs/a\\b"}, "backslash"),
        ({"out": "../x"}, "below the project"),
        ({"out": ""}, "out ''"),
        ({"name": ""}, "name ''"),
        ({"name": "two\nlines"}, "control character"),
        ({"out": "bell\a"}, "control character"),
        ({"command": ("-c", "null\0")}, "control character"),
        ({"command": "python train.py"}, "it should be a valid list"),
        ({"command": ()}, "list should have at least 1 item"),
    ],
)
def test_impossible_specs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    "text, wanted", [("90", 5400), ("1:30", 90), ("2-0", 172800), ("1-02:03", 93780), ("1-00:00:10", 86410)]
)
def test_time_is_read_as_slurm_reads_it(text, wanted):
    assert slurm.seconds(text) == wanted


def test_the_example_in_the_docstring_is_true():
    failed, attempted = doctest.testmod(job_spec)
    assert attempted and not failed


# --- site files


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "gpus_per_node = 4",
            "gpus_per_nodes = 4",
            "unknown name 'gpus_per_nodes'; allowed: .*; did you mean 'gpus",
        ),
        ("gpus_per_node = 4", 'gpus_per_node = "4"', "valid integer"),
        (
            "cores_per_node = 40",
            "cores_per_node = 0",
            "cores_per_node 0 is not allowed: it should be greater than",
        ),
        ('launcher = "srun"', 'launcher = "mpirun"', "allowed: srun, torchrun"),
        (
            "polling_seconds = 5",
            "polling_seconds = 0",
            "polling_seconds 0 is not allowed: it should be greater",
        ),
        ('max_time = ""', 'max_time = "long"', "max_time 'long': is no time; allowed: HH:MM:SS"),
        ('python = "python"', 'python = "a\\nb"', "line break"),
        ('python = "python"', "python = ", "mine.sbatch: Invalid value"),
        (
            "gpu:{gpus}",
            "gpu:{gpu}",
            "mine.sbatch: line 28: no hole {gpu}; allowed: name, .*; did you mean 'gpus'",
        ),
        (
            "{launch}",
            "srun python train.py",
            "mine.sbatch: it has no hole {launch}; do: copy generic.sbatch",
        ),
        ("#SBATCH", "# SBATCH", "mine.sbatch: it has no hole {nodes}"),
    ],
)
def test_a_wrong_site_file_is_explained(tmp_path, old, new, message):
    file = tmp_path / "mine.sbatch"
    text = (paths.root() / "slurm/sites/generic.sbatch").read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        load_site(str(file))


# --- the checker


def script(*lines):
    return "\n".join(["#!/bin/bash", *lines, "srun python train.py"]) + "\n"


@pytest.mark.parametrize(
    "text, line, message",
    [
        (script("# SBATCH --nodes=2"), 2, "comment to Slurm"),
        (script("##SBATCH --nodes=2"), 2, "comment to Slurm"),
        (script("module purge", "#SBATCH --nodes=2"), 3, "after the first command"),
        (script("#SBATCH --gres=gpu:8"), 2, "8 GPUs per node"),
        (script("#SBATCH --gpus-per-node=v100:5"), 2, "5 GPUs per node"),
        (script("#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-task=1"), 3, "8 GPUs per node"),
        (
            script("#SBATCH --ntasks-per-node=4", "#SBATCH --gres=gpu:2"),
            2,
            "4 processes do not match 2 GPUs",
        ),
        (script("#SBATCH --ntasks-per-node=2", "#SBATCH -c 50 # a quarter"), 3, "2 tasks x 50 CPUs = 100"),
        (script("#SBATCH --time=soon"), 2, "is no time"),
        (script("#SBATCH --time=03:00:00"), 2, "over the limit"),
        (script("#SBATCH --output=nowhere/%j.out"), 2, "does not exist: nowhere"),
        (script("#SBATCH -c 4", "#SBATCH --cpus-per-task=8"), 3, "there twice (also in line 2)"),
        (script("#SBATCH --gres=nvme:9,gpu:a100:8"), 2, "8 GPUs per node"),
        (script("#SBATCH --nodes=2", "#SBATCH --gpus=10"), 3, "5 GPUs per node"),
        (script("if true; then"), 4, "bash cannot read it: syntax error"),
        (script("#SBATCH --job-name='open"), 2, "quotes do not match"),
        ("#SBATCH --nodes=1\nsrun python\n", 1, "names no shell"),
    ],
)
def test_the_checker_names_the_line_and_the_fix(project, text, line, message):
    problems = check(text, "jeanzay", ask_slurm=False)
    assert len(problems) == 1, problems
    assert problems[0].line == line
    assert message in problems[0].message
    assert problems[0].fix


def test_a_good_file_has_no_problems(project):
    lines = "#SBATCH --ntasks-per-node=2 --gres=gpu:4", "#SBATCH -C 'h100|a100'", "# SBATCH lines end here"
    assert check(script(*lines), project / "slurm/sites/jeanzay.sbatch") == []


def test_a_spec_is_checked_before_it_is_submitted(project):
    job = spec(processes_per_node=5)
    assert "5 GPUs per node" in check(job, "generic", ask_slurm=False)[0].message
    with pytest.raises(UserError, match="5 GPUs per node.*at most 4"):
        submit(job, site="generic")
    assert not (project / "runs").exists()

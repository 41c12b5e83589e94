"""Jobs of programs/worker.py, for the tests that submit them; and a bounded wait for what becomes of them."""

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from project import python_path

from mpdemo import paths
from mpdemo.jobs import Job, JobSpec, submit
from mpdemo.jobs.job import read_record
from mpdemo.jobs.slurm_job import look_up
from mpdemo.world.processes import start_time

PROGRAMS = Path(__file__).parent / "programs"


def spec(*action, out="runs/toy", program="worker.py", **changes):
    command = (str(PROGRAMS / program), out, *map(str, action))
    return JobSpec(**({"name": "toy", "command": command, "out": out} | changes))


def ran(wanted, *site, **how) -> Job:
    """Submit a job, which must end well; return it."""
    job = submit(wanted, *site, **how)
    assert job.wait(100) == "done", job.log()
    return job


def attach(out):
    """The job of a run's folder, as another Python would see it."""
    folder = paths.root() / out
    return Job(read_record(folder), folder)


def options(text):
    """The directives of a batch script: option -> value."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return dict(shlex.split(line, comments=True)[0].partition("=")[::2] for line in lines)


def started(*words):
    """Start ``python -m mpdemo`` for the test's project, as in a terminal."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": python_path(paths.source()), "MPDEMO_ROOT": str(paths.root())}
    # a shell's background jobs ignore Ctrl-C
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "mpdemo", *map(str, words)]
    return subprocess.Popen(command, env=environment, preexec_fn=heed, **streams)


def stand_in(file, script):
    """Write a shell script that stands for a program."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def came(condition, seconds) -> bool:
    """Wait for a condition, at most so many seconds; return whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def until(condition, seconds=240):
    """Wait for a condition, which must come within so many seconds."""
    assert came(condition, seconds), f"it did not happen in {seconds} s"


def ended(job, seconds=120) -> str:
    """Wait until Slurm says that a job, given by its number, has ended; return its state."""
    until(lambda: look_up(job).state not in ("pending", "running"), seconds)
    return look_up(job).state


def signal_while_compiling(number, folder, cache, *command):
    """Run a program in two processes, and signal all that belongs to them while ``torch.compile`` compiles.

    Returns the launcher's exit status and what it wrote to standard error.
    """
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *command,
    ]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    with psutil.Popen(launch, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            until(lambda: any(child.name() == "cc1plus" for child in launcher.children(recursive=True)))
            for _ in range(20):  # the first compilers only try what the processor can do
                for rank in launcher.children():
                    os.killpg(rank.pid, number)
                time.sleep(0.5)
            _, printed = launcher.communicate(timeout=150)
        finally:
            if launcher.poll() is None:
                launcher.kill()
    return launcher.returncode, printed


def scontrol(*words):
    subprocess.run(["scontrol", *words], check=True, capture_output=True, timeout=30)


def sleepers(folder, count, seconds=30):
    """Wait until `count` workers sleep; return their process ids and their children's."""
    files = [folder / f"pids-{rank}" for rank in range(count)]
    until(lambda: all(file.exists() and file.read_text() for file in files), seconds)
    return [int(pid) for file in files for pid in file.read_text().split()]


def processes_in(folder) -> list:
    """Return the processes whose temporary files are in this folder: forked ones have no other name."""
    found = psutil.process_iter(["environ"])
    return [each for each in found if (each.info["environ"] or {}).get("TMPDIR") == str(folder)]


def all_gone(pids, seconds=15):
    """Whether all of these processes end within some seconds."""
    return came(lambda: not any(map(start_time, pids)), seconds)

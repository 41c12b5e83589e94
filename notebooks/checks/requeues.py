"""Whether a batch script passes on the warning before its time limit, and comes back only while it makes progress.

One rule for every exercise with such a script. Stand-ins for Slurm's commands show what its last lines do: in a
trial of some seconds no save fails, and no job starts for the thousandth time.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from checks.job_files import last_words
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script
from mpdemo.world.processes import child_environment, handles

SECONDS = 20.0  # limit for a start of the script with stand-ins, which takes one
SRUN = """#!/bin/bash
trap 'warned=yes' USR1 TERM
echo $$ > "$STAND_INS/started"
for ((i = 0; i < 100; i++)); do [ "$warned" ] && break; sleep 0.05; done
[ ! "$SAVES" ] || { mkdir -p "$(dirname "$SAVES")"; touch "$SAVES"; }
"""
SCONTROL = """#!/bin/bash
case "$*" in
  *requeue*) touch "$STAND_INS/requeued" ;;
  *hostnames*) echo localhost ;;
  *) echo "JobId=1 Restarts=${SLURM_RESTART_COUNT:-0} JobState=RUNNING" ;;
esac
"""
JOB = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_NNODES": "1",
    "SLURM_CPUS_PER_TASK": "1",
}


def read(text, least=60):
    """Judge what no trial of some seconds can show; return whether the warning goes to the script itself."""
    to_script = passed_on(text, least)
    assert "no-requeue" not in Script(text).options, (
        "Slurm would refuse to put this job back into the queue."
    )
    again = [line for line in text.splitlines() if re.match(r"[^#]*scontrol requeue", line)]
    assert again, "After the warning the job ends, and nothing puts it back into the queue."
    return to_script


def passed_on(text, least=60):
    """Require a warning of `least` s that reaches the ranks in time; return whether it goes to the script itself."""
    script, text = Script(text), text.replace("\\\n", " ")
    said = script.value("signal")
    assert said, "At the time limit, Slurm kills the training without a warning."
    to_script, (name, _, before) = said.startswith("B:"), said.removeprefix("B:").partition("@")
    unheard = (
        f"With {said} Slurm warns what srun started, and the script, which traps it, never learns of it."
    )
    assert to_script or not re.search(r"^[^#\n]*\btrap\b.*USR1", text, re.M), unheard
    assert name in ("USR1", "SIGUSR1", "10"), f"The training doesn't know the signal {name} as a warning."
    limit = slurm.limit(script.value("time") or "10-0")
    allowed = f"{said} should warn {least} to {limit - 1:.0f} s before the end: a save takes time."
    assert before.isdecimal() and least <= int(before) < limit, allowed
    handled = re.search(r"signals[-_]to[-_]handle[= ]\S*USR1|kill -(s )?(SIG)?TERM", text, re.I)
    assert handled, (
        "Unless --signals-to-handle names SIGUSR1, torchrun dies of it, and takes the ranks with it."
    )
    kept = re.search(
        r"^[^#\n]*(?:TORCH_ELASTIC_SHUTDOWN_TIMEOUT=|--shutdown-timeout[= ])\"?(\d+)", text, re.M
    )
    left = int(kept[1]) if kept else 30
    killed = f"torchrun kills the ranks {left} s after it has passed the signal on"
    assert left > 30, f"{killed}, and leaves nothing more of the {before} s to a save."
    assert 2 * left >= int(before), f"{killed}, which is less than half of the {before} s."
    assert left <= int(before), f"{killed}, but Slurm ends the job {before} s after the warning."
    return to_script


def require_progress(path, to_script, name):
    """Require that the job comes back after a new checkpoint, `name` with its step, and not otherwise."""
    back, said = comes_back(path, to_script, name, 10)
    new = f"Warned, it saved {name.format(10)} beside {name.format(5)}, and wasn't requeued."
    assert back, (
        f"{new} Does its shell trap the signal, and is {name.format(10)} the newest to it? It says: {said}."
    )
    unsaved = "It was warned, saved nothing new, and was requeued: a job that can't save would come back over and over."
    assert not comes_back(path, to_script, name, None)[0], unsaved
    over = "It was requeued after it had started 1,000 times: without a limit, a run that never finishes comes back"
    assert not comes_back(path, to_script, name, 10, restarts=999)[0], f"{over} until your hours are spent."


def comes_back(path, to_script, name, saves, restarts=0) -> tuple:
    """Run the script with stand-ins and warn it once; return whether it requeues its job, and its last words.

    A checkpoint of step 5 is there; what it starts saves the one of step `saves`, unless it is None.
    """
    with tempfile.TemporaryDirectory(prefix="mpdemo-own-") as folder:
        stand_ins, old = Path(folder, "stand-ins"), Path(folder, name.format(5))
        stand_ins.mkdir()
        old.parent.mkdir(exist_ok=True)
        old.touch()
        for command, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (stand_ins / command).write_text(text)
            (stand_ins / command).chmod(0o755)
        environment = child_environment() | JOB | {"STAND_INS": str(stand_ins), "SLURM_SUBMIT_DIR": folder}
        environment |= {
            "PATH": f"{stand_ins}:{environment['PATH']}",
            "SAVES": name.format(saves) if saves else "",
        }
        environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        with Path(folder, "log").open("w") as log:
            words = {
                "cwd": folder,
                "env": environment,
                "start_new_session": True,
                "stdout": log,
                "stderr": log,
            }
            script = subprocess.Popen(["bash", str(path.absolute())], **words)
        try:
            warn(script, stand_ins / "started", to_script)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
            script.wait()
        return (stand_ins / "requeued").exists(), last_words(Path(folder, "log"))


def warn(script, started, to_script):
    """Warn a script, or what it has started, as soon as that would hear it; wait until the script ends."""
    end = time.monotonic() + SECONDS
    warned = False
    while script.poll() is None and time.monotonic() < end:
        pid = script.pid if to_script else int((started.exists() and started.read_text()) or 0)
        if not warned and started.exists() and handles(pid, signal.SIGUSR1):
            os.kill(pid, signal.SIGUSR1)
            warned = True
        time.sleep(0.02)

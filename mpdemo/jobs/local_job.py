"""A job on this machine: the same command under torchrun, watched by a supervisor so that nothing outlives it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import diagnose
from mpdemo.jobs.answers import Answer
from mpdemo.jobs.job import Job, read_text
from mpdemo.jobs.site import seconds

GRACE = 5.0  # seconds between the request to end and the kill
STATUS = "exit-status.json"


class LocalJob(Job):
    """A job under this machine's supervisor. It ends with the Python (the notebook's kernel) that started it.

    See `mpdemo.jobs.job.Job`.
    """

    patience = 0.05

    def __init__(self, record, out, process=None):
        super().__init__(record, out)
        self._process = process  # held: its stdin is the pipe whose end ends the job

    def cancel(self):
        if self.finished:
            return
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(GRACE + 6)
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"job {self.id} ({self.name}) did not end within {GRACE + 6:g} s of its cancel"
                ) from None
        elif supervisor_lives(self.record):
            os.kill(int(self.id), signal.SIGTERM)
        self._seen = None

    def _ask(self):
        ended = self._process.poll() is not None if self._process else not supervisor_lives(self.record)
        text = read_text(self.out / STATUS)  # after the question: what is written by then is the whole truth
        if text:
            return self._final(json.loads(text))
        if ended:
            shutil.rmtree(self.record["scratch"], ignore_errors=True)
            return Answer("cancelled", "its supervisor was killed")
        return Answer("running", "", None, time.time() - self.record["submitted"])

    def _final(self, end):
        status, log = end["exit_status"], self.log()
        reason = {"orphaned": "it ended with the Python that had started it", "timeout": "TimeLimit"}.get(
            end["how"], ""
        )
        state = {"cancelled": "cancelled", "orphaned": "cancelled", "timeout": "timeout"}.get(end["how"])
        if state is None:
            state = "done" if status == 0 else "failed"
            if state == "failed" and diagnose.stopped_with_checkpoint(log, status):
                state = "stopped"
        return Answer(state, reason, status, end["run_time"])


def supervisor_lives(record) -> bool:
    """Whether the supervisor of a record is alive (and is the same process, where /proc can tell)."""
    try:
        os.kill(int(record["id"]), 0)
    except OSError:
        return False
    arguments = Path(f"/proc/{record['id']}/cmdline")
    return not arguments.exists() or b"supervisor.py" in arguments.read_bytes()


def start(spec, script) -> tuple[dict, subprocess.Popen]:
    """Start a job's processes on this machine; return its record and its supervisor."""
    root = paths.root()
    out = root / spec.out
    scratch = tempfile.mkdtemp(prefix="mpdemo-")  # short: sockets are made below it
    order = {
        "command": command(spec),
        "status": str(out / STATUS),
        "limit": seconds(spec.time_limit),
        "signal": warning(spec.signal),
        "grace": GRACE,
        "scratch": scratch,
    }
    log = out / "log.txt"
    supervisor = Path(__file__).with_name("supervisor.py")
    try:
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-S", str(supervisor), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(spec, scratch),
                cwd=root,
                start_new_session=True,
            )
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(f"cannot start a job here: {error}") from None
    record = {
        "id": process.pid,
        "where": "this machine",
        "identity": socket.gethostname(),
        "script": str(script),
        "log": str(log),
        "scratch": scratch,
        "spec": spec.as_dict(),
        "submitted": time.time(),
    }
    return record, process


def command(spec) -> list[str]:
    """The command as torchrun starts it; a single process needs no launcher."""
    if spec.world_size == 1:
        return [sys.executable, "-u", *spec.command]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={spec.world_size}", "--nnodes=1", "--node-rank=0"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    is_program = spec.command[0] == "-m" or spec.command[0].endswith(".py")
    return [sys.executable, *launcher, *([] if is_program else ["--no-python", sys.executable]), *spec.command]


def environment(spec, scratch) -> dict:
    """The processes' environment: no Slurm job around them, one thread each, this Python first."""
    unwanted = ("SLURM", "SBATCH", "SRUN", "PMI", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": scratch}
    if spec.signal:
        name = "SIG" + spec.signal.split("@")[0]
        env["PET_SIGNALS_TO_HANDLE"] = f"SIGTERM,SIGINT,SIGHUP,SIGQUIT,{name}"
    return env


def warning(signal_text) -> list | None:
    """``"USR1@60"`` as the supervisor takes it: ["USR1", 60]."""
    if signal_text is None:
        return None
    name, before = signal_text.split("@")
    return [name, int(before)]

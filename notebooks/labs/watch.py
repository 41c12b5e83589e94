"""Run a small program or a batch script, send it signals as Slurm does, and print what happens, second by second.

``%%watch USR1@1 KILL@3 python listens.py`` saves its cell as ``runs/watch/listens.py`` and starts this command there;
`watch` starts one without saving. The clock starts with the first line that the program prints. Python, torchrun and
bash run here. A batch script goes to Slurm, to a temporary one where none is found, and else to bash with stand-ins for
srun and scontrol. Taught in notebooks/53_time_limit.ipynb.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
from IPython import get_ipython

from mpdemo.errors import UserError
from mpdemo.jobs.check import Script
from mpdemo.jobs.slurm import limit
from mpdemo.labs.first_job import NONE, reached
from mpdemo.paths import root
from mpdemo.world.processes import be_killed_with_parent, child_environment

__all__ = ["seconds", "watch"]

LONGEST = 90.0  # s until the end of a program; a job gets twice as long
KILL_WAIT = 2.0  # s from SIGTERM to SIGKILL, as on the temporary Slurm
ASK = 1.0  # s between two questions to Slurm's controller, which others ask as well
PAUSE = 1.0  # s that orphans may go on after the end of the command
JOB = re.compile(r"\b(?:JobState|Restarts)=(\w+)")  # what scontrol tells of both, in this order
WIDEST = 104  # characters of a line
START = {
    "python": [sys.executable, "-u"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "bash": ["bash"],
    "sbatch": [],
}
SIGNAL = re.compile(r"([A-Z0-9]+|scancel)@(\d+(?:\.\d+)?)")
SETTING = re.compile(r"([A-Z_]+)=(.*)")
USED = f"words of watch: all, first, signals such as USR1@1.5, settings such as NAME=1, then {', '.join(START)}"
TORCHRUN = re.compile(r"^[WE]\d{4} .*?\] (?=Sending|Unable|Received)")  # what it says of signals
# tracebacks but for their last line, and what else torchrun, Slurm and Python's helpers log
NOISE = re.compile(
    r"^(Traceback|\s|\[?[WE]\d{3,4} |\[rank\d|=|-{3}|$|\^|srun: |KeyError: ./mp-)"
    r"|resource_tracker|: \w+Warning: |SignalExc"
)
WORDS = {
    r"process(es)? \d+": "a rank",
    "forcefully exiting via 9": "SIGKILL",
    r"(closing )?signal Signals\.": r"\1signal ",
    "via (Signals.SIGUSR1|10)": "with SIGUSR1",
    r"Received \S+ death signal": "received the signal",
    r"\(pid(\(s\))? [\d, ]+\)": "(pid ...)",
    r"^slurmstepd-\S+ error: \*\*\* (\w+).*(CANCELLED).* AT \S+": r"slurm: \1 \2",
    r" \*\*\*$": "",
}
ENDED = "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"
STAND_INS = """
srun() { while [[ $1 == -* ]]; do shift; done; [ "$BASHPID" = $$ ] || exec "$@"; "$@"; }
scontrol() { [ "$1" != requeue ] || touch "$0.requeued"; }
. "$0"
"""
SAID = []  # (second, line) of the last watch


def watch(line, save=None):
    """Run a command in runs/watch, send it signals, and print each of its lines with its second.

    Parameters
    ----------
    line : str
        ``[all] [first] [SIGNAL@SECONDS ...] [NAME=VALUE ...] PROGRAM ARGUMENTS``. All processes of the command get a
        signal, as from Slurm; with ``first`` only the one that was started, of a job its batch shell. ``scancel@3``
        cancels a job. ``all`` also prints what is otherwise left out: tracebacks, and what launchers log.
    save : str, optional
        The text of the file that the command names.
    """
    words, due, told, settings = _parse(line)
    folder = root() / "runs" / "watch"
    folder.mkdir(parents=True, exist_ok=True)
    if save is not None:
        file = next((word for word in words if word.endswith((".py", ".sh", ".sbatch"))), None)
        if not file:
            raise UserError(f"{line!r} names no file for the cell: NAME.py, NAME.sh or NAME.sbatch")
        (folder / file).write_text(save)
    SAID.clear()
    run = _Run(words, sorted(due), told, child_environment() | {"PYTHONUNBUFFERED": "1"} | settings)
    (run.job if words[0] == "sbatch" else run.program)(folder)


def seconds(*texts) -> list:
    """Return at which second the last `watch` first printed each text."""
    return [round(next(second for second, line in SAID if text in line), 1) for text in texts]


def _parse(line) -> tuple:
    """Return a line's command, its signals, its words of ours and its settings."""
    words, told, due, settings = line.split(), set(), [], {}
    while words and words[0] not in START:
        word = words.pop(0)
        if match := SIGNAL.fullmatch(word):
            number = getattr(signal, f"SIG{match[1].removeprefix('SIG')}", None)
            if not (number or match[1] == "scancel"):
                raise UserError(f"{word!r}: there is no such signal; {USED}")
            due.append((float(match[2]), number))
        elif match := SETTING.fullmatch(word):
            settings[match[1]] = match[2]
        elif word in ("all", "first"):
            told.add(word)
        else:
            raise UserError(f"{word!r} is not allowed; {USED}")
    if not words:
        raise UserError(f"nothing to start; {USED}")
    return words, due, told, settings


class _Run:
    """A command that is followed: its processes, its signals, and its clock, which starts with its first line."""

    def __init__(self, words, due, told, environ):
        self.words, self.due, self.told = words, due, told
        self.name = words[0].replace("sbatch", "bash")  # which stands in for it
        self.environ = environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.began, self.started, self.family = None, None, {}  # started: the clock of the signals

    def say(self, text):
        """Print a line with its second."""
        self.began = self.began or time.monotonic()
        SAID.append((time.monotonic() - self.began, text))
        print(f"{time.monotonic() - self.began:4.1f} s  {text}"[:WIDEST], flush=True)

    def hear(self, line):
        """Print a line of the program, shortened, unless nobody wants to see it."""
        if text := line.rstrip() if "all" in self.told else _kept(line.rstrip()):
            self.say(text)
            self.started = self.started or time.monotonic()

    def is_due(self):
        """Whether the next signal is."""
        return self.started and self.due and time.monotonic() - self.started >= self.due[0][0]

    def program(self, folder, before=()):
        """Run the command on this machine; return its exit status."""
        command = [*before, *(START[self.words[0]] if not before else ()), *self.words[1:]]
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        how |= {"text": True, "errors": "replace", "cwd": folder, "env": self.environ}
        how |= {"preexec_fn": be_killed_with_parent, "start_new_session": True}
        with subprocess.Popen(command, **how) as process:
            try:
                self.family = {}
                self.follow(process)
            finally:
                for child in self.family.values():  # torchrun's have sessions of their own
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode

    def follow(self, process):
        """Print and send until all is over, or for too long."""
        lines = queue.Queue()
        reader = threading.Thread(target=lambda: [*map(lines.put, process.stdout)], daemon=True)
        reader.start()
        end, ended = time.monotonic() + LONGEST, None
        while time.monotonic() < end:
            with contextlib.suppress(psutil.Error):
                first = psutil.Process(process.pid)
                self.family |= {child.pid: child for child in [first, *first.children(recursive=True)]}
            if ended is None and self.is_due():
                self.send(process.pid)
            with contextlib.suppress(queue.Empty):
                self.hear(lines.get(timeout=0.02))
                continue
            left = sum(map(_lives, self.family.values()))
            if ended is not None and (not left or time.monotonic() > ended + PAUSE):
                many = "es" * (left > 1)
                return left and self.say(
                    f"left over: {left} process{many}; watch ends {'them' if many else 'it'}"
                )
            if ended is None and process.poll() is not None:
                reader.join(0.3)  # its last lines; those of orphans come later
                while not lines.empty():
                    self.hear(lines.get())
                self.say(f"{self.name} {_end(process.returncode)}")
                ended = time.monotonic()
        return self.say(f"{self.name} has not ended after {LONGEST:g} s; watch ends it")

    def send(self, pid):
        """Send the next signal; one of Slurm's stand-in goes to the batch shell or past it, as Slurm's own does."""
        _, number = self.due.pop(0)
        number = number or signal.SIGTERM
        targets = [child for child in self.family.values() if _lives(child)]
        if "first" in self.told:
            targets = [child for child in targets if child.pid == pid]
        elif self.words[0] == "sbatch":
            targets = [child for child in targets if child.pid != pid]
        alone = f"{self.name} alone" if "first" in self.told or len(targets) == 1 else ""
        self.say(f"→ {number.name} to {alone or f'all {len(targets)} processes'}")
        for target in targets:
            with contextlib.suppress(psutil.Error):
                target.send_signal(number)

    def job(self, folder):
        """Submit a batch script, and print its log as it grows, and its states."""
        script, self.log = folder / self.words[-1], folder / f"{self.words[-1]}.log"
        self.log.unlink(missing_ok=True)
        with reached() as environ:
            if environ is None:
                return self.stand_in(folder, script)
            how = {"env": environ, "cwd": folder, "capture_output": True, "text": True, "timeout": 60}
            options = ["--parsable", f"--output={self.log}", "--open-mode=append", *self.words[1:]]
            done = subprocess.run(["sbatch", *options], **how)
            if done.returncode:
                raise UserError(f"Slurm refused {script.name}: {done.stderr.strip()}")
            number = done.stdout.strip().partition(";")[0]
            try:
                self.wait(number, how)
            finally:
                subprocess.run(["scancel", number], **how)
        return None

    def wait(self, number, how):
        """Follow a job; one that is back in the queue starts at once."""
        shown, end, back = 0, time.monotonic() + 2 * LONGEST, None
        told, asked, (state, restarts) = "", 0.0, ("", "0")
        while state not in ENDED and time.monotonic() < end:
            if time.monotonic() > asked + ASK:
                told = subprocess.run(["scontrol", "show", "job", "-o", number], **how).stdout
                asked = time.monotonic()
            lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
            for line in lines[shown:]:
                self.hear(line)
            shown = len(lines)
            if self.is_due():
                self.cancel(number, how)
            before, (state, restarts) = (state, restarts), JOB.findall(told)[:2] or (state, restarts)
            if restarts != before[1] and state != "PENDING":  # it was, between two questions
                self.say("the job is PENDING")
            if (state, restarts) != before and self.began:
                # that it runs for the first time is what its first line says
                if state in ENDED or (restarts != "0" and state != "COMPLETING"):
                    self.say(f"the job is {state}")
                if state == "PENDING":
                    back = time.monotonic()
            if back and time.monotonic() > back + 2:  # a node refuses a job within the second of its end
                subprocess.run(["scontrol", "update", f"jobid={number}", "StartTime=now"], **how)
                back = None
            time.sleep(0.1)
        if state not in ENDED:
            self.say(f"the job has not ended after {2 * LONGEST:g} s; watch cancels it")

    def cancel(self, number, how):
        """Let Slurm send the next signal; without one, it cancels the job."""
        _, sent = self.due.pop(0)
        words = ["--batch"] * ("first" in self.told) + ([f"--signal={sent.name[3:]}"] if sent else [])
        self.say(" ".join(["→ scancel", *words]))
        subprocess.run(["scancel", *words, number], **how)

    def stand_in(self, folder, script):
        """Run a batch script in bash, warned and ended as its directives say, and again when it asks for that."""
        print(f"{NONE}: bash runs the script on this machine, and this cell sends Slurm's signals")
        said = Script(script.read_text())
        last = limit(said.value("time") or "10-0")
        name, _, before = (said.value("signal") or "").rpartition(":")[2].partition("@")
        if last <= LONGEST and not self.due:
            warned = [(last - float(before), signal.Signals[f"SIG{name}"])] if before else []
            self.due = [*warned, (last, None)]
        self.due += [(at + KILL_WAIT, signal.SIGKILL) for at, number in self.due if not number]
        self.environ |= {"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "1"}
        again = script.with_name(f"{script.name}.requeued")
        for _ in range(9):
            again.unlink(missing_ok=True)
            status = self.program(folder, ["bash", "-c", STAND_INS, str(script)])
            if not again.exists():
                break
            self.say("the job is PENDING")
        self.say(f"the job is {'FAILED' if status else 'COMPLETED'}")


def _lives(process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _end(status) -> str:
    return (
        f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    )


def _kept(line) -> str:
    """Return what is shown of a line: of a traceback its last line, of torchrun only what it says of signals."""
    of_torchrun = TORCHRUN.match(line)
    line = f"torchrun: {line[of_torchrun.end() :]}" if of_torchrun else line
    for pattern, words in WORDS.items():
        line = re.sub(pattern, words, line)
    return "" if NOISE.search(line) else line


if get_ipython():
    get_ipython().register_magic_function(watch, "cell", "watch")

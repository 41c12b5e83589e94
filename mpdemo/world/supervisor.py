"""Start the processes of a job, watch them, report the first that fails, and let nothing of them survive.

A supervisor starts the ranks as its children, adopts every orphan of theirs, and ends the whole tree when the job ends,
on SIGTERM, at the time limit, or when its owner dies, which it sees by the end of a pipe. It is a launcher (launch.py),
or was forked for a job of a notebook (warm.py).
"""

import math
import os
import select
import signal
import sys
import time

from mpdemo.world.family import PRCTL, adopt_orphans, end_children, held_port, reap, send
from mpdemo.world.processes import be_killed_with_parent, handles

NAME = 15  # PR_SET_NAME
STOPPED = 3  # the exit status of a process that stopped with a checkpoint
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


class Ranks:
    """The processes of a job: their numbers, and the exit statuses of those that have ended, the first one first."""

    def __init__(self, job):
        self.numbers, self.ended = [], {}
        self.held = held_port()
        parent, (ready, unready) = os.getpid(), os.pipe()
        for rank in range(job["processes"]):
            pid = os.fork()
            if pid == 0:
                try:
                    become_rank(job, rank, self.held.getsockname()[1], parent)
                except BaseException as error:
                    print(f"cannot start {job['command'][0]}: {error}", file=sys.stderr, flush=True)
                finally:  # whatever happens, a child never continues its parent's program
                    os._exit(127)
            self.numbers.append(pid)
        for descriptor in (unready, *job.get("inputs", ())):
            os.close(descriptor)
        os.read(ready, 1)  # its end: each rank has closed it, and let go of this process's signal handlers
        os.close(ready)
        with open(job.get("ranks", os.devnull), "w") as file:
            file.write("\n".join(map(str, self.numbers)) + "\n")

    def reap(self):
        """Collect ended children, the adopted ones too, and note the ranks' own statuses."""
        for pid, status in reap().items():
            if pid in self.numbers:
                self.ended[self.numbers.index(pid)] = status if status >= 0 else 128 - status

    @property
    def living(self) -> list[int]:
        """The numbers of those that run."""
        return [pid for rank, pid in enumerate(self.numbers) if rank not in self.ended]

    @property
    def failed(self) -> tuple | None:
        """Rank and exit status of the one that failed first."""
        return next((ended for ended in self.ended.items() if ended[1]), None)


def become_rank(job, rank, port, parent):
    """In a forked child: run the job's program as a rank, and end."""
    be_killed_with_parent()
    if os.getppid() != parent:
        return
    os.setsid()  # Ctrl-C reaches the launcher alone
    signal.set_wakeup_fd(-1)
    for number in (*STOPS, signal.SIGUSR1, signal.SIGCHLD):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ |= job["environment"]
    os.dup2(job["inputs"][rank] if job.get("inputs") else os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 256)
    processes, command = job["processes"], job["command"]
    if processes > 1 or job.get("torchrun"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # by which Lightning and others know torchrun
        place |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": job["name"]}
        os.environ |= {name: str(value) for name, value in place.items()}
    if job.get("run_program") and (command[0] in ("-m", "-c") or command[0].endswith(".py")):
        PRCTL(NAME, f"{job['name'][:11]} {rank}".encode(), 0, 0, 0)
        job["run_program"](command)
    os.execvpe(sys.executable, [sys.executable, "-u", *command], os.environ)


def watch(job, ranks, terminations, warnings, wake) -> str:
    """Wait for the job's end; return how it came: ended, cancelled, timeout or orphaned."""
    started, stop, owner = time.monotonic(), None, job.get("owner", ())
    name, _, before = (job.get("signal") or "").partition("@")
    while True:
        readable = select.select([wake, *owner], [], [], 0.05)[0]
        if wake in readable:
            os.read(wake, 4096)
        ranks.reap()
        now = time.monotonic()
        if ranks.failed and ranks.failed[1] == STOPPED:
            stop = stop or now + max(job["grace"], int(before or 0))
        left = job.get("limit", math.inf) - (now - started)
        lost = any(descriptor in readable and not os.read(descriptor, 1) for descriptor in owner)
        if how := end_of(ranks, now > (stop or 0), terminations, lost, left):
            return how
        if name and left <= int(before):
            warnings.append(signal.Signals[f"SIG{name}"])
            name = ""
        if warnings and all(handles(pid, warnings[0]) for pid in ranks.living):
            send(ranks.living, warnings.pop(0))


def end_of(ranks, out_of_patience, terminations, lost_owner, left) -> str | None:
    """Return how the job ends now, None while it runs; a failed rank ends it once the others had time to stop."""
    if not ranks.living or ranks.failed and out_of_patience:
        return "ended"
    if terminations:
        return "cancelled"
    if lost_owner:
        return "orphaned"
    return "timeout" if left <= 0 else None


def end_tree(job, ranks):
    """Ask the job to end, wait, then kill whatever is left below this process."""
    send(ranks.living, signal.SIGTERM)
    end = time.monotonic() + job["grace"]
    while ranks.living and time.monotonic() < end:
        ranks.reap()
        time.sleep(0.02)
    end_children(ranks.living)


def supervise(job) -> dict:
    """Run a job from its start to its end; return how that came, the rank that failed first, and the exit status.

    `job` has its ``name``, ``command``, ``processes``, ``cwd``, ``environment`` and ``grace`` (s, between the request
    to end and the kill), and may have ``torchrun`` (a single process is told its place as well), ``run_program`` (runs
    the command in a forked process), ``inputs`` (a descriptor for each rank), ``owner`` (a descriptor whose end ends
    the job), ``limit`` (s), ``signal`` (as ``USR1@60``), ``ranks`` (the file of the processes' numbers) and ``quiet``
    (no line about a rank that failed).
    """
    adopt_orphans()
    terminations, warnings = [], []
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    # Handlers, since a new program inherits SIG_IGN but no handler. Under nohup SIGHUP stays ignored.
    ends = STOPS - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())
    handlers = dict.fromkeys(ends, lambda number, _: terminations.append(number))
    handlers |= {signal.SIGUSR1: lambda number, _: warnings.append(number), signal.SIGCHLD: lambda *_: None}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    started = time.monotonic()
    ranks = Ranks(job)
    how = watch(job, ranks, terminations, warnings, wake)
    rank, status = ranks.failed or (None, 0 if how == "ended" else 1)
    if how == "ended" and status and len(ranks.numbers) > 1 and not job.get("quiet"):
        print(f"mpdemo: rank {rank} of {len(ranks.numbers)} ended with exit status {status}", flush=True)
    end_tree(job, ranks)
    signal.set_wakeup_fd(-1)
    os.close(wake)
    os.close(woken)
    for number, handler in before.items():
        signal.signal(number, handler)
    end = {"how": how, "rank": rank, "exit_status": status, "run_time": time.monotonic() - started}
    return end | {"signal": next(iter(terminations), None)}

"""A group of processes as the kernel sees it: started, told what to run, asked where they are, ended."""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

from mpdemo.errors import UserError, error_line
from mpdemo.ranks import rank as rank_process
from mpdemo.ranks.places import place_in_program
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.processes import child_environment
from mpdemo.world.supervisor import free_port

IMPORT_SECONDS = 300.0  # limit for the server's import of PyTorch, for which the first start waits
START_SECONDS = 60.0  # limit for joining the process group
POLL = 0.1  # s

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["torch.distributed", "torch.optim"])


class CellFailed(UserError):
    """A cell failed on some rank (its errors are printed above), or the ranks could not be started."""


class Processes:
    """The living processes of one process group; `run` runs texts in them, `stop` ends them."""

    def __init__(self, world_size, group=True, files=None, per_node=None):
        self.folder = Path(tempfile.mkdtemp(prefix="mpdemo-ranks-"))
        self.ranks, self.answers = [], {}
        atexit.register(self.stop)
        try:
            self.ranks = [Rank(number, self.folder) for number in range(world_size)]
            self._fork()
            self._join(group, files, per_node or world_size)
        except BaseException:
            self.stop()
            raise

    def _fork(self):
        """Fork the processes, in a thread: nothing else can bound the wait for the server."""
        errors = []

        def fork():
            try:
                for rank in self.ranks:
                    rank.process.start()
                    rank.far_end.close()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=fork, daemon=True)
        thread.start()
        thread.join(IMPORT_SECONDS)
        if thread.is_alive():
            raise CellFailed(f"PyTorch was not imported within {IMPORT_SECONDS:.0f} s; run this cell again")
        if errors:
            raise CellFailed(f"the ranks did not start: {error_line(errors[0])}")

    def _join(self, group, files, per_node):
        """Tell each process who it is, and wait until all have joined the process group."""
        working_folder, world_size = self.folder / "work" if files is not None else Path.cwd(), len(self.ranks)
        working_folder.mkdir(exist_ok=True)
        for name, content in (files or {}).items():
            (working_folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        environment = child_environment() | ON_THE_CPU | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the machine's name, which may fail
        for number, rank in enumerate(self.ranks):
            on_node = min(per_node, world_size - number // per_node * per_node)
            place = {"RANK": number, "LOCAL_RANK": number % per_node, "LOCAL_WORLD_SIZE": on_node}
            place = {name: str(value) for name, value in place.items()}
            with contextlib.suppress(OSError):  # it is gone: `dead` says so
                rank.pipe.send((environment | place, str(working_folder), group))
        self._gather(range(world_size), START_SECONDS)
        if dead := self.dead():
            raise CellFailed(f"the ranks did not start: {dead}")
        if len(self.answers) < world_size:
            raise CellFailed(f"the ranks did not join each other within {START_SECONDS:.0f} s; run this cell again")
        if files is None:
            shutil.rmtree(self.folder)  # their files are open

    def run(self, parts, chosen, seconds, patience=None, show=False):
        """Run texts on the chosen ranks, and put what these answer into `answers`: number -> see rank.run.

        An answer is missing where the time was over, or some process ended, first; with `patience` also where some
        rank failed that long ago.
        """
        for number in chosen:
            with contextlib.suppress(OSError):
                self.ranks[number].pipe.send((parts, seconds, show))
        self._gather(chosen, seconds, patience)

    def _gather(self, chosen, seconds, patience=None):
        self.answers, end = {}, time.monotonic() + seconds
        while len(self.answers) < len(chosen) and time.monotonic() < end:
            waiting = {self.ranks[number].pipe: number for number in chosen if number not in self.answers}
            for pipe in wait(waiting, POLL):
                with contextlib.suppress(EOFError, OSError):
                    self.answers[waiting[pipe]] = pipe.recv()
            failed = patience is not None and any(answer[1] for answer in self.answers.values())
            if failed or not self.alive:
                end = min(end, time.monotonic() + (patience or 0))

    @property
    def alive(self) -> bool:
        """Whether every process lives."""
        return all(rank.process.exitcode is None for rank in self.ranks)

    def dead(self) -> str:
        """Say which ranks ended and how; "" if all live."""
        dead = [(number, rank) for number, rank in enumerate(self.ranks) if rank.process.exitcode is not None]
        return "; ".join(f"rank {number} is gone: {rank.last_words()}" for number, rank in dead)

    def places(self, chosen, parts) -> str:
        """Say where each of the chosen ranks is: done, failed, or at a line of the first of the texts."""
        return "; ".join(f"rank {number} {self._place(number, parts)}" for number in chosen)

    def _place(self, number, parts) -> str:
        if answer := self.answers.get(number):
            return "failed" if answer[1] else "is done"
        report = self.ranks[number].stack()
        for source, filename in parts:
            if f'"{filename}"' in report:
                place = place_in_program(report, filename, source)
                return place if filename == parts[0][1] else place.partition(", line")[0] + ", outside your program"
        return "still runs"

    def stop(self):
        """End all processes and what they started, at once: a rank that waits in gloo obeys no other signal."""
        atexit.unregister(self.stop)
        for rank in self.ranks:
            rank.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Rank:
    """One process as the kernel sees it, with the files that get what it prints, and its stack or last words."""

    def __init__(self, number, folder):
        for name in ("output", "log"):
            (folder / f"{name}{number}").touch()
        self.output, self.log = (open(folder / f"{name}{number}", errors="replace") for name in ("output", "log"))  # noqa: SIM115
        self.pipe, self.far_end = FORKING.Pipe()
        self.process = FORKING.Process(target=rank_process.main, args=(self.far_end, str(folder), number))

    def printed(self) -> str:
        """Return what the rank has printed since the last call."""
        return self.output.read()

    def stack(self) -> str:
        """Ask the process for the stack of its threads; return "" if it does not answer within 1 s."""
        self.log.seek(0, os.SEEK_END)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, rank_process.STACK_SIGNAL)
        report, deadline = "", time.monotonic() + 1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            more = self.log.read()
            if report and not more:
                break
            report += more
        return report

    def last_words(self) -> str:
        """Say how the process ended."""
        status = self.process.exitcode
        if status < 0:
            return f"its process was killed ({signal.Signals(-status).name})"
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() if status == 1 else []  # of an error before the first program
        return lines[-1] if lines else f"its process exited with status {status}"

    def stop(self):
        """End the process, and all that it started."""
        if self.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
        for file in (self.pipe, self.output, self.log):
            file.close()

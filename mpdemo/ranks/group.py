"""A group of processes as the kernel sees it: started, told what to run, asked where they are, ended.

They run under a supervisor, as a job's processes do (`mpdemo.world.supervisor`). Each has a pipe to the kernel.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from mpdemo.errors import UserError, error_line
from mpdemo.front_end import waiting_for
from mpdemo.ranks.places import place_in_program
from mpdemo.ranks.rank import STACK_SIGNAL
from mpdemo.world import warm
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.processes import child_environment, end_processes, is_running, start_time

START_SECONDS = 60.0  # limit for joining the process group
END_SECONDS = 3.0  # in which the supervisor says how a rank ended
POLL = 0.1  # s
LINES = 20  # of each rank that a page shows while it runs
# gloo would look up the machine's name, which may fail
ENVIRONMENT = warm.OF_RANKS | {"GLOO_SOCKET_IFNAME": "lo"} | ON_THE_CPU


class CellFailed(UserError):
    """A cell failed on some rank (its errors are printed above), or the ranks could not be started."""


class Processes:
    """The living processes of one process group; `run` runs texts in them, `stop` ends them."""

    def __init__(self, world_size, group=True, files=None, per_node=None):
        self.folder = Path(tempfile.mkdtemp(prefix="mpdemo-ranks-"))
        self.answers, self.gone, self.supervisor = {}, set(), (None, None)
        self.ranks = [Rank(self.folder, number) for number in range(world_size)]
        atexit.register(self.stop)
        try:
            call = f"main({str(self.folder)!r}, {per_node or world_size}, {group})"
            self._start(["-c", f"from mpdemo.ranks.rank import main; {call}"], files)
        except BaseException:
            self.stop()
            raise

    def _start(self, command, files):
        """Let a supervisor start the processes, and wait until all have joined the process group."""
        working_folder = self.folder / "work" if files is not None else Path.cwd()
        working_folder.mkdir(exist_ok=True)
        for name, content in (files or {}).items():
            (working_folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        order = {
            "name": "ranks",
            "command": command,
            "processes": len(self.ranks),
            "torchrun": True,
            "grace": 0.5,
        }
        order |= {"cwd": str(working_folder), "environment": child_environment() | ENVIRONMENT}
        order |= {"scratch": str(self.folder), "status": str(self.folder / "status"), "quiet": True}
        try:
            far_ends = [rank.far_end.fileno() for rank in self.ranks]
            pid, self.owned = warm.supervise(order, self.folder / "log", far_ends)
        except OSError as error:
            raise CellFailed(f"the ranks did not start: {error_line(error)}") from None
        self.supervisor = pid, start_time(pid)
        for rank in self.ranks:
            rank.far_end.close()
        self._gather(range(len(self.ranks)), START_SECONDS)
        if dead := self.dead():
            raise CellFailed(f"the ranks did not start: {dead}")
        if len(self.answers) < len(self.ranks):
            raise CellFailed(
                f"the ranks did not join each other within {START_SECONDS:.0f} s; run this cell again"
            )
        for number, rank in enumerate(self.ranks):
            rank.pid = self.answers[number][0]

    def run(self, parts, chosen, seconds, patience=0.0, show=False):
        """Run texts on the chosen ranks, until all have answered or `patience` seconds after one has failed."""
        for number in chosen:
            self.ranks[number].text = ""
            with contextlib.suppress(OSError):
                self.ranks[number].pipe.send((parts, seconds, show))
        self._gather(chosen, seconds, patience, lambda: self.printed(chosen) if show else "")

    def _gather(self, chosen, seconds, patience=0.0, printed=str):
        self.answers, end = {}, time.monotonic() + seconds
        with waiting_for(
            lambda: " and ".join(f"rank {number}" for number in self._unanswered(chosen)), printed
        ):
            while (left := self._unanswered(chosen)) and time.monotonic() < end:
                pipes = {self.ranks[number].pipe: number for number in left}
                for pipe in wait(pipes, POLL):
                    try:
                        self.answers[pipes[pipe]] = pipe.recv()
                    except (EOFError, OSError):
                        self.gone.add(pipes[pipe])
                if self.gone or any(answer[1] for answer in self.answers.values()):
                    end = min(end, time.monotonic() + patience)

    def _unanswered(self, chosen) -> list:
        """Return the chosen ranks that live and have not answered."""
        return [number for number in chosen if number not in self.answers and number not in self.gone]

    def printed(self, chosen) -> str:
        """Return the last lines that each of the chosen ranks has printed so far, labelled with its number."""
        lines = [line for number in chosen for line in self.ranks[number].labelled()[-LINES:]]
        return "".join(f"{line}\n" for line in lines)

    @property
    def alive(self) -> bool:
        """Whether every process lives: where one fails, the supervisor ends the others and itself."""
        return not self.gone and is_running(*self.supervisor)

    def dead(self) -> str:
        """Say which rank ended first and how; "" if all live."""
        ended = self.first_to_end()
        return f"rank {ended[0]} is gone: {ended[1]}" if ended else ""

    def first_to_end(self) -> tuple | None:
        """Return the rank that ended first, and how it ended, in words; None if all live."""
        if self.alive:
            return None
        status, end = self.folder / "status", time.monotonic() + END_SECONDS
        while not status.exists() and is_running(*self.supervisor) and time.monotonic() < end:
            time.sleep(POLL / 5)
        ended = json.loads(status.read_text()) if status.exists() else {}
        number = min(self.gone, default=0) if ended.get("rank") is None else ended["rank"]
        # it ends with a rank that fails, and tells the status
        unknown = 0 if is_running(*self.supervisor) else 1
        return number, self.ranks[number].last_words(ended.get("exit_status", unknown))

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
                return (
                    place
                    if filename == parts[0][1]
                    else place.partition(", line")[0] + ", outside your program"
                )
        return "still runs"

    def stop(self):
        """End all processes and what they started."""
        atexit.unregister(self.stop)
        end_processes([self.supervisor] if self.supervisor[0] else [], signal.SIGTERM)
        for rank in self.ranks:
            for file in (rank.pipe, rank.far_end, rank.output, rank.log):
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Rank:
    """One process as the kernel sees it, with the files that get what it prints, and its stack or last words."""

    def __init__(self, folder, number):
        self.folder, self.number, self.pid, self.text = folder, number, None, ""
        files = (folder / f"output{number}", folder / f"log{number}")
        self.output, self.log = (open(file, "w+", errors="replace") for file in files)  # noqa: SIM115
        self.pipe, self.far_end = multiprocessing.Pipe()

    def printed(self) -> str:
        """Return what the rank has printed since it was last told to run something."""
        self.text += self.output.read()
        return self.text

    def labelled(self) -> list:
        """Return the lines of what it has printed, each with the rank's number."""
        return [f"[rank {self.number}] {line}" for line in self.printed().splitlines()]

    def stack(self) -> str:
        """Ask the process for the stack of its threads; return "" if it does not answer within 1 s."""
        self.log.seek(0, os.SEEK_END)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        report, deadline = "", time.monotonic() + 1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            more = self.log.read()
            if report and not more:
                break
            report += more
        return report

    def last_words(self, status) -> str:
        """Say how the process ended, with an exit status of its own or by a signal."""
        self.log.seek(0)
        text = self.log.read() or (self.folder / "log").read_text()
        if status > 128:
            killed = f"its process was killed ({signal.Signals(status - 128).name})"
            # of gloo: a message is too long
            sizes = re.search(r"what\(\).*length <= op.nbytes. (\d+) vs (\d+)", text)
            crossed = "{}: sizes crossed, {} bytes came for a tensor of {}. Compare the ranks' calls and their order."
            return crossed.format(killed, *sizes.groups()) if sizes else killed
        lines = text.strip().splitlines() if status == 1 else []  # of an error before the first program
        return lines[-1] if lines else f"its process exited with status {status}"

"""A group of ranks beside the kernel, and a cell that runs on them: started by `start_ranks` in ranks.py."""

import os
import time

from mpdemo.errors import UserError
from mpdemo.notebook import ranks_engine
from mpdemo.notebook.ranks_processes import RankProcesses
from mpdemo.ranks.places import place_in_program

POLL = 0.1  # s, polling interval
ENDED = "The ranks were ended: run ranks.restart(), or this cell again, for fresh ones without earlier variables."


class CellFailed(UserError):
    """A cell failed on some rank; its errors are printed above."""


class Ranks:
    """The ranks of one kernel. `start_ranks` makes it; the magic ``%%ranks`` calls `run`."""

    def __init__(self, world_size):
        self.world_size, self.cells, self.processes = world_size, 0, None

    @property
    def alive(self) -> bool:
        """Whether every rank lives."""
        return self.processes is not None and all(rank.alive for rank in self.processes.ranks)

    def start(self):
        """Start the processes."""
        self.processes = RankProcesses(self.world_size)

    def stop(self):
        """End the processes. The next cell starts fresh ones."""
        processes, self.processes = self.processes, None
        if processes:
            processes.stop()

    def restart(self):
        """End the ranks, also those that wait for ever, and start fresh ones, which know no earlier variables."""
        self.stop()
        self.start()
        print(self.describe("fresh "), "without earlier variables", sep=", ")

    def describe(self, adjective="") -> str:
        """One line: how many ranks there are, and on what."""
        cores = "one core each" if len(os.sched_getaffinity(0)) >= self.world_size else "sharing the cores"
        count = "1 {}rank is" if self.world_size == 1 else f"{self.world_size} {{}}ranks are"
        return f"{count.format(adjective)} ready: gloo, {cores}"

    def __repr__(self):
        return self.describe() if self.alive else f"{self.world_size} ranks, ended"

    def run(self, source, only=(), timeout=20.0):
        """Run a cell on all ranks, or on those in `only`; print what each one prints, in order of rank.

        Raises
        ------
        CellFailed
            It raised on some rank, a rank's process ended, or a rank was not done after `timeout` seconds. After the
            last two all ranks are ended.
        """
        if not self.processes:
            self.restart()
        cell = Cell(self, source, only or range(self.world_size))
        if not self.alive:
            self.fail(f"{cell.dead()}.")
        try:
            done = cell.wait(timeout)
        except KeyboardInterrupt:
            cell.show()
            self.fail(f"Interrupted: {cell.places()}.")
        dead = cell.dead()
        failed = cell.show(errors=not dead)  # the others' errors would only say that a connection closed
        if dead or not done:
            self.fail(f"{dead}." if dead else f"After {timeout:g} s {cell.places()}.")
        if failed:
            raise CellFailed(f"the cell failed on rank{'s'[: len(failed) - 1]} {_joined(failed)}; see above")

    def fail(self, sentence):
        """End all ranks and raise: a process group with a rank that waits or is gone cannot be used again."""
        self.stop()
        raise CellFailed(f"{sentence} {ENDED}")


class Cell:
    """A cell that runs on some ranks."""

    def __init__(self, ranks, source, numbers):
        ranks.cells += 1
        self.all, self.source, self.filename = ranks.processes.ranks, source, f"<ranks cell {ranks.cells}>"
        self.numbers, self.answers = numbers, {}

    def wait(self, timeout) -> bool:
        """Run the cell; return whether all ranks were done before the time-out and none died."""
        for number in self.numbers:
            view = self.all[number].view
            self.answers[number] = view.apply_async(ranks_engine.run_cell, self.source, self.filename)
        deadline = time.monotonic() + timeout
        while waiting := [answer for answer in self.answers.values() if not answer.ready()]:
            if time.monotonic() > deadline or not all(rank.alive for rank in self.all):
                return False
            waiting[0].wait(POLL)
        return True

    def show(self, errors=True) -> list:
        """Print each rank's output, and its error unless `errors` is False; return the ranks that failed."""
        failed = []
        for number, answer in self.answers.items():
            lines = self.all[number].output.read().splitlines()
            error, line = answer.get() if errors and answer.ready() else (None, None)
            if error:
                failed.append(number)
                lines.append(error + (f"  (line {line})" if line else ""))
            for text in lines:
                print(f"[rank {number}] {text}")
        return failed

    def dead(self) -> str:
        """Say which ranks ended and how; "" if all live."""
        dead = [(number, rank) for number, rank in enumerate(self.all) if not rank.alive]
        return "; ".join(f"rank {number} is gone: {rank.last_words()}" for number, rank in dead)

    def places(self) -> str:
        """Say where each rank is."""
        return "; ".join(f"rank {number} {self.place(number)}" for number in self.answers)

    def place(self, number) -> str:
        """Say where one rank is: done, failed, or at a line of the cell."""
        answer = self.answers[number]
        if answer.ready():
            return "failed" if answer.get()[0] else "is done"
        return place_in_program(self.all[number].read_stack(), self.filename, self.source)


def _joined(numbers) -> str:
    """``0``, ``0 and 1``, ``0, 1 and 2``."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last

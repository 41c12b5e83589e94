"""On call: a page, a real job with a fault that you don't know, questions that cost minutes, and a verdict.

case = on_call(3)                # the number draws the fault, its rank and its details
case.ask("log")
print(case.answer("rank 2", "uneven data", "repair that rank's data, resume", because="files"))
"""

import base64
import json
import shutil
import subprocess
import sys

import psutil
from IPython.display import display

from mpdemo.errors import UserError, wrapped
from mpdemo.labs.on_call.incidents import (
    CAUSES,
    COST,
    INCIDENTS,
    NEXT,
    NODE,
    PAR,
    PORT,
    ROOM,
    filled,
    unseal,
)
from mpdemo.notebook.plots import curves
from mpdemo.paths import root, source
from mpdemo.world.processes import PROCESS_MIB, child_environment

GPUS, WRONG = 64, 30  # of the job in the story; minutes that a wrong verdict costs: the job fails again in the same way
SECONDS = 400  # until the page, at the very most
PLACES = [*(f"rank {rank}" for rank in range(4)), "node 1", "node 2", "all ranks"]
STARTED = {}  # by number: a cell that is run again finds its case
FOLDER = "runs/on_call"  # of the flight recorders' files


def on_call(number=..., slurm=False):
    """Start a job with a fault, wait until the pager rings, and return the case; for the same number, the same case.

    The job has ended by then: what you ask for was gathered at the moment of the page. With `slurm` it's a job on a
    throw-away Slurm, where a node can die.
    """
    if number is ...:
        print("No page yet. Replace the ... by a number, and run this cell again.")
        return Case()
    if (case := STARTED.get((number, slurm))) is None:
        case = STARTED[number, slurm] = Case(recorded(number, slurm))
    page = unseal(case._sealed)["page"]
    print(wrapped(f"03:12. {page} Clues, and the minutes they cost: {prices()}."))
    return case


def recorded(number, slurm):
    """Let another process run the job and gather the clues; return the incident, sealed."""
    free = psutil.virtual_memory().available // 2**20
    if free < 5 * PROCESS_MIB:
        raise UserError(f"the job's processes need {5 * PROCESS_MIB} MiB, and {free} MiB are free")
    print("A job of four ranks starts. The pager rings when something is wrong with it, in less than a minute.")
    words = [sys.executable, "-m", "mpdemo.labs.on_call.record"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, cwd=source(), env=child_environment()) as process:
        try:
            asked = json.dumps({"number": number, "slurm": slurm}).encode()
            sealed, errors = process.communicate(asked, timeout=SECONDS)
        finally:
            process.terminate()  # it then ends the job
    if process.returncode:
        raise UserError(f"the job did not start: {errors.decode().strip().splitlines()[-1]}")
    return sealed


def choices():
    """Print what an answer may say."""
    for name, words in ("where", PLACES), ("cause", CAUSES), ("then", NEXT):
        print(wrapped(f"{name}: {'; '.join(words)}"))


def prices():
    return ", ".join(f"{name} {minutes}" for name, (minutes, _) in COST.items())


class Case:
    """One incident: what you can ask, and the clock."""

    __slots__ = ("_asked", "_sealed", "minutes")

    def __init__(self, sealed=None):
        self._sealed, self._asked, self.minutes = sealed, [], 0

    def ask(self, name):
        """Print a clue, which costs its minutes."""
        if self._sealed is None:
            print("No page yet: start the case first.")
            return
        if name not in COST:
            raise UserError(f"no clue {name!r}; there are: {prices()}")
        self.minutes += COST[name][0]
        self._asked.append(name)
        incident = unseal(self._sealed)
        print(f"{COST[name][1]} ({COST[name][0]} min, {self.minutes} in all)\n{incident['clues'][name]}")
        if name in ("loss", "losses") and incident["curves"]:
            display(curves(lines_of(incident["curves"], name)))
        if name == "recorder":
            write_recorders(incident["dumps"])

    def answer(self, where=..., cause=..., then=..., because=...):
        """Judge where it is, what it is, what to do next, and the clue that shows it; a wrong answer costs minutes."""
        given = where, cause, then, because
        if self._sealed is None or ... in given:
            return ...
        allowed = PLACES, CAUSES, NEXT, self._asked
        for value, words, what in zip(given, allowed, ("where", "cause", "then", "because"), strict=True):
            if value not in words:
                raise UserError(f"{what}={value!r} is none of: {'; '.join(words) or 'nothing that you have asked for'}")
        incident = unseal(self._sealed)
        if wrong := self._wrong(incident, *given):
            self.minutes += WRONG
            return f"Wrong: {', '.join(wrong)}. The job fails again in the same way, which costs {WRONG} minutes."
        return verdict(incident, self.minutes)

    def _wrong(self, incident, where, cause, then, because):
        """Name what is wrong with an answer."""
        truth, rank = INCIDENTS[incident["kind"]], incident["rank"]
        places = {incident["where"]}
        if truth.next in (NODE, PORT, ROOM):  # the rank and its node are the same place
            places |= {f"rank {rank}", filled("node {n}", rank)}
        wrong = ["where it is"] * (where not in places) + ["the cause"] * (cause != truth.cause)
        wrong += ["what to do next"] * (then != truth.next)
        shown = because in [*truth.also, *(name for name, *_ in truth.chain)]
        return wrong or ([] if shown else [f"the evidence, since {because} doesn't show this cause"])


def verdict(incident, minutes):
    """Say what a right answer cost beside the best order of questions, and what each clue showed."""
    truth, rank, par = INCIDENTS[incident["kind"]], incident["rank"], PAR[incident["kind"]]
    lost, least = (minutes * GPUS / 60 for minutes in (minutes, par))
    score = f"{lost:.1f} GPU hours lost on {GPUS} GPUs. The best order of questions loses {least:.1f} on such a page"
    lines = [f"Right. {score}: score {min(1, par / minutes):.0%}."]
    lines += [f"{name} ({COST[name][0]} min): {filled(said, rank)}." for name, _, said in truth.chain]
    return " ".join([*lines, filled(truth.why, rank)]).strip()


def lines_of(losses, name):
    """Return the curves of a clue: the mean beside last week's, or each rank's own."""
    first, ranks = losses["first"], losses["ranks"]
    lines = {f"rank {rank}": values for rank, values in enumerate(ranks)}
    if name == "loss":
        mean = [sum(values) / len(ranks) for values in zip(*ranks, strict=True)]
        lines = {"this run": mean, "last week": losses["last week"]}
    return {
        label: [{"step": step, "loss": loss} for step, loss in enumerate(values, first)]
        for label, values in lines.items()
    }


def write_recorders(dumps):
    """Write the ranks' flight recorders where torchfrtrace finds them."""
    shutil.rmtree(folder := root() / FOLDER, ignore_errors=True)
    folder.mkdir(parents=True)
    for rank, dump in dumps.items():
        (folder / f"rank_{rank}").write_bytes(base64.b64decode(dump))

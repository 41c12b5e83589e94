"""On call: a page, a real job with a fault that you don't know, questions that cost minutes, and a verdict."""

import base64
import json
import pickle
import subprocess
import sys

import psutil
from IPython.display import display

from mpdemo.errors import QUOTED, UserError, wrapped
from mpdemo.labs.on_call.incidents import COST, NEXT, PLACES, answer_to, causes_of, unseal
from mpdemo.notebook.plots import curves, style
from mpdemo.paths import source
from mpdemo.world.processes import PROCESS_MIB, child_environment

# of the job in the story; minutes that a wrong verdict costs: the job fails again in the same way
GPUS, WRONG, WRONGLY = 64, 30, "wrong answers"
SECONDS = 400  # until the page, at the very most
STARTED = {}  # by name: a cell that is run again finds its case
MOST = 40  # collectives in a picture
LOOKS = {  # of a collective
    "all_reduce": {"facecolor": style.paler(style.SKY, 0.8)},
    "broadcast": {"facecolor": style.paler(style.ORANGE, 0.8), "hatch": "////"},
    "barrier": {"facecolor": style.paler(style.GREEN, 0.7), "hatch": "...."},
    "not called": {"facecolor": "none", "linestyle": ":"},
}


def on_call(number=...):
    """Start a job with a fault, wait until the pager rings, and return the case; for the same number, the same case.

    What you ask for was gathered at the moment of the page; then the job was ended.
    """
    if number is ...:
        print("No page yet. Replace the ... by a number, and run this cell again.")
        return Case()
    if not isinstance(number, int) or not 0 <= number < 10**9:
        raise UserError(
            f"on_call takes a whole number from 0 to 999999999, as on_call(29); not {QUOTED.repr(number)}"
        )
    if number not in STARTED:
        STARTED[number] = Case(recorded(number))
    case = STARTED[number]
    print(wrapped(f"03:12. {unseal(case._sealed)['page']}"))
    if case.spent:
        print(f"Your clock runs: {case.bill()}.")
    return case


def recorded(number):
    """Let another process run the job and gather the clues; return the incident, sealed."""
    free = psutil.virtual_memory().available // 2**20
    if free < 5 * PROCESS_MIB:
        raise UserError(f"the job's processes need {5 * PROCESS_MIB} MiB, and {free} MiB are free")
    print(
        "A job of four ranks starts. The pager rings when something is wrong with it, in less than a minute."
    )
    words = [sys.executable, "-m", "mpdemo.labs.on_call.record"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, cwd=source(), env=child_environment()) as process:
        try:
            asked = json.dumps({"number": number}).encode()
            sealed, errors = process.communicate(asked, timeout=SECONDS)
        finally:
            process.terminate()  # it then ends the job
    if process.returncode:
        raise UserError(f"the job did not start: {errors.decode().strip().splitlines()[-1]}")
    return sealed


class Case:
    """One incident: what you can ask, and the clock."""

    __slots__ = ("_sealed", "spent")

    def __init__(self, sealed=None):
        self._sealed = sealed
        self.spent = {}  # minutes, by clue; and those of wrong answers

    def choices(self, of):
        """Print what you can ask for ("clue"), or what an answer may say ("where", "cause" or "then")."""
        if self._sealed is None:
            print("No page yet: start the case first.")
            return
        lines = {
            "clue": [f"{name:8} {minutes} min: {what}" for name, (minutes, what) in COST.items()],
            "where": [f"{', '.join(places)}: {what}" for places, what in PLACES.items()],
            "cause": causes_of(unseal(self._sealed)["kind"]),
            "then": NEXT,
        }
        if of not in list(lines):
            raise UserError(f"no choices of {QUOTED.repr(of)}; there are: {', '.join(lines)}")
        print(wrapped("\n".join(lines[of])))

    def ask(self, name):
        """Print a clue, which costs its minutes, once."""
        if self._sealed is None:
            print("No page yet: start the case first.")
            return
        if name not in list(COST):
            raise UserError(f"no clue {QUOTED.repr(name)}; there are: {', '.join(COST)}")
        costs = 0 if name in self.spent else COST[name][0]
        self.spent.setdefault(name, costs)
        incident = unseal(self._sealed)
        print(f"{COST[name][1]} ({costs} min, {self.minutes} in all)\n{incident['clues'][name]}")
        if name in incident["curves"]:
            display(curves(incident["curves"][name]))

    @property
    def minutes(self):
        return sum(self.spent.values())

    def bill(self):
        """Return what was spent on what, as text."""
        return f"{self.minutes} min ({', '.join(f'{what} {spent}' for what, spent in self.spent.items())})"

    def who_waits(self, most=5):
        """Draw the last collectives of each rank, by number, from the flight recorders."""
        if "recorder" not in self.spent:
            raise UserError('who_waits draws what the clue "recorder" tells; do: case.ask("recorder")')
        if not isinstance(most, int) or not 0 < most <= MOST:
            raise UserError(f"most={QUOTED.repr(most)} is not allowed; allowed: 1 to {MOST} collectives")
        dumps = unseal(self._sealed)["dumps"]
        calls = {
            f"rank {rank}": calls_of(pickle.loads(base64.b64decode(dump))) for rank, dump in dumps.items()
        }
        if not any(calls.values()):
            raise UserError("no rank has left a flight recorder with a collective; ask for another clue")
        return picture_of({rank: called for rank, called in calls.items() if called}, most)

    def answer(self, where=..., cause=..., then=..., because=...):
        """Judge where it is, what it is, what to do next, and the clue that shows it; a wrong answer costs minutes."""
        given = {"where": where, "cause": cause, "then": then, "because": because}
        if self._sealed is None or ... in given.values():
            return ...
        incident, asked = unseal(self._sealed), [name for name in self.spent if name in COST]
        allowed = sum(PLACES, ()), causes_of(incident["kind"]), NEXT, asked
        for (what, value), words in zip(given.items(), allowed, strict=True):
            if value not in words:
                raise UserError(
                    f"{what}={value!r} is none of: {'; '.join(words) or 'nothing that you have asked for'}"
                )
        truth = answer_to(incident["kind"], incident["rank"])
        wrong = [place_said(where, truth.where)] * (where not in truth.where)
        wrong += ["the cause"] * (cause != truth.cause) + ["what to do next"] * (then != truth.then)
        if not wrong and because not in truth.evidence:
            wrong = [f"the evidence, since {because} doesn't show this cause"]
        if wrong:
            self.spent[WRONGLY] = self.spent.get(WRONGLY, 0) + WRONG
            return f"Wrong: {', '.join(wrong)}. The job fails again in the same way, which costs {WRONG} minutes."
        spent = f"You spent {self.bill()}, or {self.minutes * GPUS / 60:.1f} GPU hours of {GPUS} GPUs."
        lines = ["Right.", spent, *(f"{clue}: {said}." for clue, said in truth.chain)]
        return " ".join([*lines, truth.why]).strip()


def place_said(where, places):
    """Say that a place is wrong, and which sort of place is meant if it's of another sort."""
    sorts = [place.split()[0] for place in places]  # all, rank or node
    meant = "all ranks" if sorts[0] == "all" else f"a {sorts[0]}"
    return "where it is" if where.split()[0] in sorts else f"where it is, since {meant} is meant"


def calls_of(dump):
    """Return the names of a rank's collectives, by number."""
    return {
        entry["collective_seq_id"]: entry["profiling_name"].partition(":")[2] for entry in dump["entries"]
    }


def picture_of(calls, most):
    """Draw the last collectives of each rank."""
    last = max(map(max, calls.values()))
    numbers = range(last - most + 1, last + 1)

    def paint(figure, axes):
        for height, called in enumerate(calls.values()):
            for number in numbers:
                name = called.get(number, "not called")
                look = style.EDGE | LOOKS.get(name, {"facecolor": style.PAPER})
                axes.barh(height, 0.9, left=number - 0.45, height=0.7, **look)
                box = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 1}
                axes.text(number, height, name, ha="center", va="center", fontsize=8, bbox=box)
        axes.set(xlabel="number of the collective", xlim=(numbers[0] - 0.6, last + 0.6), xticks=numbers)
        axes.grid(visible=False)
        style.name_bars(axes, range(len(calls)), list(calls))

    ends = [
        f"{rank} waits in number {max(called)}, {called[max(called)]}" for rank, called in calls.items()
    ]
    alt = f"Collectives {numbers[0]} to {last} of each rank. {'; '.join(ends)}."
    return style.picture(paint, "the last collectives of each rank, by number", alt, 7.2, 2.4)

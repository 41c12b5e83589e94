"""No text takes the reader of logs long: neither its expressions, nor lines, blocks and logs of any size."""

import random
import re
import re._constants as op
import re._parser as parser
import signal

import pytest

from mpdemo.jobs import slurm, slurm_job
from mpdemo.ranks import places
from mpdemo.tools.explain import asked, known, live, looks, reading, unknown
from mpdemo.tools.explain import findings as explain

MODULES = (explain, known, looks, reading, slurm, slurm_job, unknown, places, asked, live)
SAMPLES = {
    op.CATEGORY_DIGIT: "7",
    op.CATEGORY_WORD: "w",
    op.CATEGORY_SPACE: " ",
    op.CATEGORY_NOT_SPACE: "w",
}


def expressions() -> dict:
    """Return all expressions of the reader, by their places; one of a label as often as it comes."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            values = value if isinstance(value, list | tuple) else [value]
            for number, one in enumerate(values):
                one = one[0] if name == "AGREE" else one.pattern if isinstance(one, re.Pattern) else one
                if isinstance(one, str) and (name == "AGREE" or isinstance(values[number], re.Pattern)):
                    found[one] = f"{module.__name__}.{name} {number}"
    found[f"^(?:{looks.TIME}|{looks.LABEL}|{looks.GLOG.pattern}|{looks.LOGGER})*"] = "labels"
    rows = {
        row.pattern.pattern: f"row {row.seen[0]}"
        for row in known.known_failures()
        if "..." in str(row.seen)
    }
    return (
        found | rows | {row.unless: f"unless {row.seen[0]}" for row in known.known_failures() if row.unless}
    )


def sample(tree, choose) -> list:
    """Return a text that an expression finds, one piece for each of its parts."""
    pieces, words = [], ""
    for kind, value in tree:
        if kind is op.LITERAL:
            words += chr(value)
            continue
        pieces, words = [*pieces, words], ""
        if kind is op.IN:
            kinds = [part for part in value if part[0] is not op.NEGATE]
            what, of = choose(kinds)
            of = chr(of[0] if what is op.RANGE else of) if what is not op.CATEGORY else SAMPLES.get(of, ":")
            pieces.append(of if len(kinds) == len(value) else "x")
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            pieces += sample(value[2], choose) * max(1, value[0])
        elif kind is op.SUBPATTERN:
            pieces += sample(value[3], choose)
        elif kind is op.BRANCH:
            pieces += sample(choose(value[1]), choose)
        elif kind in (op.ANY, op.NOT_LITERAL):
            pieces.append("x")
    return [piece for piece in [*pieces, words] if piece]


def texts(expression, rounds, length) -> set:
    """Return long texts of what an expression looks for: the beginning of a match, then a part of it many times."""
    choose, found = random.Random(0).choice, set()
    for _ in range(rounds):
        pieces = sample(parser.parse(expression), choose)
        for first in range(len(pieces)):
            for last in range(first + 1, min(len(pieces), first + 3) + 1):
                part = "".join(pieces[first:last])
                found.add("".join(pieces[:first]) + part * (length // len(part)))
            part = "".join(pieces[: first + 1])
            found |= {part * (length // len(part)), part * (length // len(part)) + pieces[-1]}
    return found


@pytest.mark.parametrize(
    ("length", "rounds", "limit"),
    [(20_000, 5, 0.4), pytest.param(100_000, 50, 2, marks=pytest.mark.nightly)],
)
def test_no_expression_goes_back_and_forth_in_what_it_looks_for(length, rounds, limit):
    def late(*_):
        raise TimeoutError

    slow, before = set(), signal.signal(signal.SIGVTALRM, late)
    try:
        for expression, place in expressions().items():
            compiled = re.compile(expression, re.MULTILINE)
            for text in texts(expression, 1 if place.startswith("row") else rounds, length):
                signal.setitimer(signal.ITIMER_VIRTUAL, limit)  # s of the processor
                try:
                    compiled.search(text)
                    compiled.match(text)
                except TimeoutError:
                    slow.add(f"{place}: {text[:80]!r}")
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert not slow

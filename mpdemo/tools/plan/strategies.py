"""Every strategy for one training in one table: whether it fits, what it needs, sends and takes.

    request = PlanRequest("resnet101", batch=512, devices=8)
    print(table(request, compare(request)))

The rules and their order are those of `mpdemo.tools.plan.choose`. ``mpdemo plan`` prints this table.
Taught in notebooks/12_which_one.ipynb.
"""

from typing import NamedTuple

from tabulate import tabulate

from mpdemo import terminal
from mpdemo.predict.request import MIB, PlanRequest, Prediction
from mpdemo.tools.plan import own
from mpdemo.tools.plan.choose import asked

HEADERS = (
    "",
    "strategy",
    "fits",
    "peak memory\n(MiB)",
    "bytes sent\n(MiB)",
    "communication\n(ms)",
    "step time\n(ms)",
    "speed-up",
)
NEEDED = 4  # columns that are always shown


class Strategy(NamedTuple):
    """One way to train: the answer and the rung of a rule, whether it fits, and what it needs; None if it cannot be."""

    answer: str
    rung: str
    fits: bool
    predicted: Prediction | None


def compare(request: PlanRequest) -> list[Strategy]:
    """Return the strategies for a `request`: those that fit, in the order of the rules, then the others by memory."""
    result = []
    for rule, predicted in asked(request):
        fits = predicted is not None and bool(predicted.memory <= request.limit)  # numpy's is no JSON
        result.append(Strategy(rule.answer, rule.rung, fits, predicted))
    return sorted(result, key=lambda s: 0 if s.fits else s.predicted.memory if s.predicted else float("inf"))


def as_row(request, strategy) -> dict:
    """Return a strategy as a row of a JSON file, in which None stands for what is not known."""
    predicted = strategy.predicted
    row = {"strategy": strategy.answer, "fits": strategy.fits}
    if predicted is None:
        return row | dict.fromkeys(("memory_mib", "stages_mib", "messages_mib", "seconds"))
    return row | {
        "memory_mib": predicted.memory / MIB,
        "stages_mib": [peak / MIB for peak in predicted.stages] or None,
        "messages_mib": predicted.sent / MIB,
        "seconds": predicted.seconds and predicted.seconds + predicted.seconds_sending(request),
    }


def table(request: PlanRequest, strategies: list[Strategy]) -> str:
    """Return the `strategies` for a `request`, as `compare` returns them, as text, a row each.

    Memory is what PyTorch allocates on the fullest device, and for a pipeline of at most eight stages on each of them,
    in order. Times add up the estimates, with no communication hidden behind the computation: it can be hidden in part,
    and kernels rarely reach a data sheet's peak. Speed-ups are over one device that computes in float32 and has room
    for everything.
    """
    is_own, rows = request.spec.is_own, []
    one_device = own.one_device_seconds(request) if is_own else request.one_device_seconds
    for number, strategy in enumerate(strategies):
        predicted, row = strategy.predicted, as_row(request, strategy)
        mark = "->" if number == 0 and strategy.fits else ""
        if predicted is None:
            rows.append((mark, strategy.answer, "not planned" if is_own else "cannot", *[""] * 5))
            continue
        seconds, sending = row["seconds"], predicted.seconds_sending(request)
        rows.append(
            (
                mark,
                strategy.answer,
                "yes" if strategy.fits else f"{(predicted.memory - request.limit) / MIB:,.0f} MiB over",
                "\n".join(f"{mib:,.0f}" for mib in row["stages_mib"] or [row["memory_mib"]]),
                f"{row['messages_mib']:,.0f}",
                f"{1000 * sending:,.1f}",
                f"{1000 * seconds:,.1f}" if seconds else "",
                f"{one_device / seconds:.2f}" if seconds and one_device else "",
            )
        )
    return _as_wide_as_the_terminal(rows)


def _as_wide_as_the_terminal(rows) -> str:
    """Return the rows as text, on a narrow terminal without the last columns."""
    alignment = ("left", "left", "left", *["right"] * 5)
    for columns in range(len(HEADERS), NEEDED - 1, -1):
        shown, headers = [row[:columns] for row in rows], HEADERS[:columns]
        text = tabulate(shown, headers, "simple", disable_numparse=True, colalign=alignment[:columns])
        if terminal.width() is None or len(text.splitlines()[-1]) <= terminal.width():
            break
    more = [" ".join(header.split()) for header in HEADERS[columns:]]
    return text + f"\nA wider terminal, or --json, also has: {', '.join(more)}" * bool(more)

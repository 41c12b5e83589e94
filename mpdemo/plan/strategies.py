"""Every strategy for one training in one table: whether it fits, what it needs, sends and takes.

    case = Case("resnet101", batch=512, devices=8)
    print(table(case, compare(case)))

The rules and their order are those of `mpdemo.plan.choose`. ``python -m mpdemo plan`` prints this table.
Taught in notebooks/11_which_one.ipynb.
"""

from typing import NamedTuple

from tabulate import tabulate

from mpdemo.plan.case import Fit
from mpdemo.plan.choose import asked
from mpdemo.plan.subject import MIB


class Strategy(NamedTuple):
    """One way to train: the answer and the rung of a rule, whether it fits, and its `Fit`; None where it cannot be."""

    answer: str
    rung: str
    fits: bool
    predicted: Fit | None


def compare(case) -> list[Strategy]:
    """Return the strategies for a case: those that fit in the order of the rules, then the others by their memory."""
    result = [Strategy(r.answer, r.rung, bool(fit) and fit.memory <= case.limit, fit) for r, fit in asked(case)]
    return sorted(result, key=lambda s: 0 if s.fits else s.predicted.memory if s.predicted else float("inf"))


def as_row(case, strategy) -> dict:
    """Return a strategy as a row of a JSON file, in which None stands for what is not known."""
    fit = strategy.predicted
    return {
        "strategy": strategy.answer,
        "fits": strategy.fits,
        "memory_mib": fit and fit.memory / MIB,
        "stages_mib": [peak / MIB for peak in fit.stages] if fit and fit.stages else None,
        "messages_mib": fit and fit.sent / MIB,
        "seconds": fit and fit.seconds and fit.seconds + fit.sent / case.link,
    }


def table(case, strategies) -> str:
    """Return the strategies as text, a row each.

    Memory is what PyTorch allocates on the fullest device, and for a pipeline on each of them, in the order of the
    stages. Times add up the case's estimates, with no communication hidden behind the computation: it can be hidden in
    part, and kernels rarely reach a data sheet's peak. Speed-ups are over one device that computes in float32 and has
    room for everything.
    """
    one_device = case.one_device_seconds
    rows = []
    for number, strategy in enumerate(strategies):
        fit, mark = strategy.predicted, "->" if not number and strategy.fits else ""
        if not fit:
            rows.append((mark, strategy.answer, "cannot", *[""] * 5))
            continue
        seconds = as_row(case, strategy)["seconds"]
        rows.append(
            (
                mark,
                strategy.answer,
                "yes" if strategy.fits else f"{(fit.memory - case.limit) / MIB:,.0f} MiB over",
                "\n".join(f"{peak / MIB:,.0f}" for peak in fit.stages or [fit.memory]),
                f"{fit.sent / MIB:,.0f}",
                f"{1000 * fit.sent / case.link:,.1f}",
                f"{1000 * seconds:,.1f}" if seconds else "",
                f"{one_device / seconds:.2f}" if seconds else "",
            )
        )
    headers = "", "strategy", "fits", "MiB per\ndevice", "MiB\nsent", "sends\n(ms)", "step\n(ms)", "speed-up"
    alignment = ("left", "left", "left", *["right"] * 5)
    return tabulate(rows, headers, "simple", disable_numparse=True, colalign=alignment)

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

ONE_DEVICE = "one device"  # among the times that are known, beside the answers of the rules


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


def as_row(case, strategy, known) -> dict:
    """Return a strategy as a row of a JSON file, in which None stands for what is not known."""
    fit = strategy.predicted
    seconds = fit and fit.seconds and fit.seconds + fit.sent / case.link
    return {
        "strategy": strategy.answer,
        "fits": strategy.fits,
        "memory_mib": fit and fit.memory / MIB,
        "messages_mib": fit and fit.sent / MIB,
        "seconds": known.get(strategy.answer) if known else seconds,
    }


def table(case, strategies, known=None) -> str:
    """Return the strategies as text, a row each.

    Memory is what PyTorch allocates on the fullest device. Times add up the case's estimates, with no communication
    hidden behind the computation: it can be hidden in part, and kernels rarely reach a data sheet's peak. Speed-ups are
    over one device that computes in float32 and has room for everything. `known` replaces the times: the seconds of a
    step by answer, and of ONE_DEVICE.
    """
    one_device = known[ONE_DEVICE] if known else case.one_device_seconds
    rows = []
    for number, strategy in enumerate(strategies):
        fit, mark = strategy.predicted, "->" if not number and strategy.fits else ""
        if not fit:
            rows.append((mark, strategy.answer, "cannot", *[""] * 5))
            continue
        seconds = as_row(case, strategy, known)["seconds"]
        rows.append(
            (
                mark,
                strategy.answer,
                "yes" if strategy.fits else f"{(fit.memory - case.limit) / MIB:,.0f} MiB over",
                f"{fit.memory / MIB:,.0f}",
                f"{fit.sent / MIB:,.0f}",
                "" if known else f"{1000 * fit.sent / case.link:,.1f}",
                f"{1000 * seconds:,.1f}" if seconds else "",
                f"{one_device / seconds:.2f}" if seconds and one_device else "",
            )
        )
    headers = "", "strategy", "fits", "MiB per\ndevice", "MiB\nsent", "sends\n(ms)", "step\n(ms)", "speed-up"
    alignment = ("left", "left", "left", *["right"] * 5)
    return tabulate(rows, headers, "simple", disable_numparse=True, colalign=alignment)

"""Every strategy for one training in one table: whether it fits, what it needs, sends and takes.

    case = Case("resnet101", batch=128, devices=8, memory=8 * 2**30)
    print(table(case, compare(case)))

The rules and their order are those of `mpdemo.plan.choose`. ``python -m mpdemo plan --devices`` prints this table.
Taught in notebooks/11_which_one.ipynb.
"""

from dataclasses import dataclass, replace
from math import sqrt

from tabulate import tabulate

from mpdemo.plan.choose import RULES
from mpdemo.plan.fit import Fit
from mpdemo.plan.memory import MIB

ONE_DEVICE = "one device"  # among measured times, beside the answers of the rules
DOUBLINGS, EXACT = 16, 1.01  # how far, and how exactly, the memory is searched on which a strategy would fit


@dataclass(frozen=True)
class Strategy:
    """One way to train, on the devices there are or on larger ones.

    Attributes
    ----------
    answer, rung : str
        As in `mpdemo.plan.choose.Rule`.
    fits : bool
    predicted : Fit or None
        Where it does not fit: on the smallest devices on which it would. None where no memory helps (a batch that
        does not divide, a model that cannot be cut, layers that cannot be split).
    """

    answer: str
    rung: str
    fits: bool
    predicted: Fit | None


def compare(case) -> list[Strategy]:
    """Return the strategies for a case: those that fit in the order of the rules, then the others by their memory."""
    rules = [rule for rule in RULES if rule.several == (case.devices > 1)]
    result = []
    for rule in rules:
        predicted = rule.find(case)
        result.append(Strategy(rule.answer, rule.rung, bool(predicted), predicted or smallest(case, rule)))
    return sorted(result, key=lambda s: 0 if s.fits else s.predicted.memory if s.predicted else float("inf"))


def smallest(case, rule) -> Fit | None:
    """Return a rule's answer on devices of the least memory on which it fits, to 1 %; None where none helps."""
    low = high = case.memory
    for _ in range(DOUBLINGS):
        low, high = high, 2 * high
        if best := rule.find(replace(case, memory=high)):
            break
    else:
        return None
    while high / low > EXACT:
        middle = sqrt(low * high)
        if better := rule.find(replace(case, memory=middle)):
            best, high = better, middle
        else:
            low = middle
    return best


def table(case, strategies, measured=None) -> str:
    """Return the strategies as text, a row each.

    Memory is what PyTorch allocates on the fullest device. Times are sums of those of the case, in float32, with no
    message hidden behind the computation: real ones are hidden in part, and real kernels are slower than a data sheet
    says. `measured` has the seconds of a step by their answers, and of ONE_DEVICE, in place of these; None where
    nothing was measured.
    """
    one_device = measured[ONE_DEVICE] if measured else case.one_device_seconds
    rows = []
    for number, strategy in enumerate(strategies):
        fit, mark = strategy.predicted, "->" if not number and strategy.fits else ""
        if not fit:
            rows.append((mark, strategy.answer, "cannot", *[""] * 5))
            continue
        over = fit.memory - case.limit
        messages = fit.sent / case.link
        seconds = measured.get(strategy.answer) if measured else fit.seconds and fit.seconds + messages
        rows.append(
            (
                mark,
                strategy.answer,
                "yes" if strategy.fits else f"{over / MIB:,.0f} MiB over",
                f"{fit.memory / MIB:,.0f}",
                f"{fit.sent / MIB:,.0f}",
                "" if measured else f"{1000 * messages:,.1f}",
                f"{1000 * seconds:,.1f}" if seconds else "",
                f"{one_device / case.devices / seconds:.0%}" if seconds and one_device else "",
            )
        )
    headers = "", "strategy", "fits", "MiB per\ndevice", "MiB\nsent", "messages\n(ms)", "step\n(ms)", "of the\nbound"
    alignment = ("left", "left", "left", *["right"] * 5)
    return tabulate(rows, headers, "simple", disable_numparse=True, colalign=alignment)


def changes_that_fit(case) -> list[str]:
    """Return what to change where nothing fits: the memory of a device, or how many devices there are, as options."""
    needed = [s.predicted.memory for s in compare(case) if s.predicted]
    offers = [f"--gpu-memory {-(-(min(needed) + case.memory - case.limit) // 2**30):.0f}GiB"] if needed else []
    for factor in (2, 4, 8, 16):
        more = replace(case, devices=factor * case.devices, nodes=factor * case.nodes)
        if any(s.fits for s in compare(more)):
            return [*offers, f"--devices {more.devices} --nodes {more.nodes}"]
    return offers

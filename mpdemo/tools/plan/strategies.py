"""Every strategy for one training in one table: whether it fits, what it needs, sends and takes.

    request = PlanRequest(OwnModel("my_file.py:my_function", (4096,), tokens=True), batch=512, devices=8)
    print(table(request, compare(request)))

``mpdemo plan`` prints this table. Taught in notebooks/12_which_one.ipynb.
"""

from dataclasses import replace
from typing import NamedTuple

from tabulate import tabulate

from mpdemo import terminal
from mpdemo.errors import UserError
from mpdemo.predict.footprint import MIB
from mpdemo.tools.plan import own
from mpdemo.tools.plan.request import NotNeeded, NotPlanned, PlanRequest, Prediction, Rule, mib

HEADERS = (
    "",
    "strategy",
    "fits",
    "peak memory\n(MiB)",
    "bytes sent\n(MiB)",
    "communication\n(ms)",
    "step time\n(ms)",
    "speed-up",
    "flags of\ntrain_gpt.py",
)
NEEDED = 4  # columns that are always shown
LORA = ", LoRA"
NOTHING = "none: more devices, or larger ones"


class Strategy(NamedTuple):
    """One way to train: its rule, whether it fits, what it needs; without that, the reason why it is not planned."""

    rule: Rule
    fits: bool
    predicted: Prediction | None
    reason: str = ""

    @property
    def answer(self) -> str:
        """What the table calls it."""
        return self.rule.answer


def compare(request: PlanRequest) -> list[Strategy]:
    """Return the strategies for a `request`: those that fit, the fastest first, then the others by memory.

    The first one is the recommended one, if it fits. LoRA, which trains something else, and what no data sheet gives a
    time come after what fits besides, in the order of the rules.

    Raises
    ------
    UserError
        The nodes do not divide the devices, or every device could hold the model but the batch does not divide.
    """
    _check(request)
    result = []
    for rule in own.rules_of(request):
        request.progress(rule.answer)
        try:
            predicted = own.with_spread(request, rule.find)
            result.append(Strategy(rule, bool(predicted.memory <= request.limit), predicted))  # numpy's is no JSON
        except NotNeeded:
            continue
        except NotPlanned as error:
            result.append(Strategy(rule, False, None, str(error)))
    return sorted(result, key=_place)


def _place(strategy) -> tuple:
    """Return what the strategies are sorted by."""
    found = strategy.predicted
    if not strategy.fits:
        return 2, found.memory if found else float("inf")
    return (1, 0.0) if LORA in strategy.answer or found.seconds is None else (0, found.seconds)


def _check(request):
    """Refuse what cannot be shared out."""
    if request.devices < 1 or request.nodes < 1 or request.devices % request.nodes:
        raise UserError(
            f"{request.devices} devices in {request.nodes} nodes; allowed: equally many in each node, 1 or more"
        )
    per_device = -(-request.batch // request.devices) * request.devices
    if request.batch % request.devices and _replica_fits(replace(request, batch=per_device)):
        raise UserError(
            f"a batch of {request.batch} does not divide by {request.devices} devices, each of which could hold the "
            f"model; allowed: a multiple of {request.devices}, such as {per_device}"
        )


def _replica_fits(request) -> bool:
    """Return whether each device can hold the whole model."""
    try:
        return own.replicated(request).memory <= request.limit
    except NotPlanned:
        return False


def recommended(request: PlanRequest, strategies: list[Strategy]) -> str:
    """Return the answer and the reason for it, from what `compare` returns."""
    (answer, why, _), fits, found, _ = strategies[0]
    if fits and found:
        why = why.format(parts=found.parts, devices=request.devices)
        if found.parts > 1 and "{parts}" not in strategies[0].rule.why:
            why += f", over {found.parts} microbatches"
        return f"{answer}: {why}: {mib(found.memory)} of {mib(request.limit)} per device."
    why = f"Weights, gradients and optimizer states need {mib(request.states())}; a device has {mib(request.limit)}"
    why += ", too little also for one image." if request.states() <= request.limit else "."
    return f"{NOTHING}: {why}"


def as_row(strategy: Strategy) -> dict:
    """Return a strategy as a row of a JSON file, in which None stands for what is not known."""
    predicted = strategy.predicted
    row = {"strategy": strategy.answer, "fits": strategy.fits}
    if predicted is None:
        return row | dict.fromkeys(("memory_mib", "stages_mib", "messages_mib", "seconds", "spread", "flags"))
    return row | {
        "memory_mib": predicted.memory / MIB,
        "stages_mib": [peak / MIB for peak in predicted.stages] or None,
        "messages_mib": predicted.sent / MIB,
        "seconds": predicted.seconds,
        "spread": predicted.spread,
        "flags": predicted.flags or None,
    }


def table(request: PlanRequest, strategies: list[Strategy]) -> str:
    """Return the `strategies` for a `request`, as `compare` returns them, as text, a row each.

    Memory is what PyTorch allocates on the fullest device, and for a pipeline of at most eight stages on each of them,
    in order. Times are those of kernels that reach what `PlanRequest.efficiency` says, with the interval in which its
    spread puts them, and communication is hidden behind the computation but for a first gather or a last reduction,
    and inside blocks. Speed-ups are over one device in the same precision, in whose memory everything fits.
    """
    rows, one_device = [], {bf16: own.one_device_seconds(request, bf16) for bf16 in (False, True)}
    for number, strategy in enumerate(strategies):
        predicted, row = strategy.predicted, as_row(strategy)
        mark = "->" if number == 0 and strategy.fits else ""
        if predicted is None:  # a note says why
            continue
        seconds, alone = row["seconds"], one_device[", bf16" in strategy.answer]
        rows.append(
            (
                mark,
                strategy.answer,
                "yes" if strategy.fits else f"{(predicted.memory - request.limit) / MIB:,.0f} MiB over",
                "\n".join(f"{mib:,.0f}" for mib in row["stages_mib"] or [row["memory_mib"]]),
                f"{row['messages_mib']:,.0f}",
                f"{1000 * predicted.sending:,.1f}",
                _time(predicted),
                f"{alone / seconds:.2f}" if seconds and alone else "",
                predicted.flags,
            )
        )
    return _as_wide_as_the_terminal(rows)


def _time(predicted) -> str:
    """Return the milliseconds of a step, and their interval where one is known."""
    if not predicted.seconds:
        return ""
    return f"{1000 * predicted.seconds:,.1f}" + (f" ± {predicted.spread:.0%}" if predicted.spread else "")


def _as_wide_as_the_terminal(rows) -> str:
    """Return the rows as text, on a narrow terminal without the last columns."""
    alignment = ("left", "left", "left", *["right"] * 5, "left")
    for columns in range(len(HEADERS), NEEDED - 1, -1):
        shown, headers = [row[:columns] for row in rows], HEADERS[:columns]
        text = tabulate(shown, headers, "simple", disable_numparse=True, colalign=alignment[:columns])
        if terminal.width() is None or len(text.splitlines()[-1]) <= terminal.width():
            break
    more = [" ".join(header.split()) for header in HEADERS[columns:]]
    return f"{text}\nA wider terminal, or --json, also has: {', '.join(more)}" if more else text

"""Every strategy for one training in one table: whether it fits, what it needs, sends and takes.

    request = PlanRequest(OwnModel("my_file.py:my_function", (4096,), tokens=True), batch=512, devices=8)
    print(table(request, compare(request)))

``mpdemo plan`` prints this table. Taught in notebooks/72_which_one.ipynb.
"""

from dataclasses import replace
from typing import NamedTuple

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.tools import terminal
from mpdemo.tools.plan import own
from mpdemo.tools.plan.request import (
    ACCUMULATION,
    CHECKPOINTING,
    OFFLOAD,
    NotNeeded,
    NotPlanned,
    PlanRequest,
    Prediction,
    Rule,
    mib,
)
from mpdemo.tools.plan.roof import MIB

# With how many published runs, and how many peaks that a GPU measured, rows were compared, recomputed or not: a test
# counts them in tests/bench/published.py. Rows of other strategies were compared with none.
RUNS = {"single": 1, "single, bf16": 5, "fsdp, bf16": 16, "hsdp, bf16": 16}
PEAKS = {"single": 3, "single, bf16": 5}
COLUMNS = {  # of a row as `as_rows` returns it -> header, and how a value is written
    "mark": ("", "{}"),
    "strategy": ("strategy", "{}"),
    "room": ("fits", "{}"),
    "peaks": ("peak memory\n(MiB)", "{}"),
    "peaks_compared": ("measured\npeaks", "{}"),
    "milliseconds": ("step time\n(ms)", "{}"),
    "runs_compared": ("published\nruns", "{}"),
    "per_second": ("{unit}\nper second", "{:,.0f}"),
    "mfu": ("MFU", "{:.0%}"),
    "speed_up": ("speed-up", "{:.2f}"),
    "gpu_hours": ("GPU hours", "{:,.1f}"),
    "price": ("price\n(EUR)", "{:,.1f}"),
    "messages_mib": ("bytes sent\n(MiB)", "{:,.0f}"),
    "sending_ms": ("communication\n(ms)", "{:,.1f}"),
    "flags": ("flags of\ntrain_gpt.py", "{}"),
}
# columns that are always shown; those that are no numbers
NEEDED, TEXTS = 4, ("mark", "strategy", "room", "flags")
# of a row that is planned
COUNTED = "memory_mib", "peaks_compared", "stages_mib", "messages_mib", "sending_ms"
# of a row
TIMED = "seconds", "spread", "runs_compared", "per_second", "mfu", "speed_up", "gpu_hours", "price"
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

    The order is that of estimates, and was compared with no runs. LoRA, which trains something else, and what no data
    sheet gives a time come after what fits besides, in the order of the rules.

    Raises
    ------
    UserError
        The nodes do not divide the devices, or every device could hold the model but the batch does not divide.
    """
    _check(request)
    result = []
    for rule in own.rules_of(request):
        if rule.answer.endswith(OFFLOAD) and any(row.fits and LORA not in row.answer for row in result):
            continue
        request.progress(rule.answer)
        try:
            known = _runs(request, rule.answer)  # what was compared with none has no interval
            predicted = own.with_spread(request, rule.find) if known else rule.find(request)
            # numpy's is no JSON
            result.append(Strategy(rule, bool(predicted.memory <= request.limit), predicted))
        except NotNeeded:
            continue
        except NotPlanned as error:
            result.append(Strategy(rule, False, None, str(error)))
    return sorted(result, key=_place)


def _compared(numbers, answer) -> int:
    """Return how many `RUNS` or `PEAKS` a row was compared with."""
    return numbers.get(answer.replace(CHECKPOINTING, "").replace(ACCUMULATION, ""), 0)


def _runs(request, answer) -> int:
    """Return how many published runs a row's time was compared with: none, if all kernels are at best."""
    return _compared(RUNS, answer) if any(request.efficiency.spreads) else 0


def _place(strategy) -> tuple:
    """Return what the strategies are sorted by."""
    found = strategy.predicted
    if not strategy.fits:
        return 2, found.memory if found else float("inf")
    return (1, 0.0) if LORA in strategy.answer or found.seconds is None else (0, found.seconds)


def _check(request):
    """Refuse devices that nodes, and a batch that devices, do not divide."""
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
    """Return the first of the strategies that `compare` returns, and why it comes first."""
    (answer, why, _), fits, found, _ = strategies[0]
    if fits and found:
        why = why.format(parts=found.parts, devices=request.devices)
        if found.parts > 1 and "{parts}" not in strategies[0].rule.why:
            why += f", over {found.parts} microbatches"
        first = f"{answer}: {why}: {mib(found.memory)} of {mib(request.limit)} per device."
        if found.seconds is None or LORA in answer:
            return first
        return f"{first} Its estimated step is the shortest of those that fit; this order was compared with no runs."
    why = f"Weights, gradients and optimizer states need {mib(request.states())}; a device has {mib(request.limit)}"
    why += ", too little also for one image." if request.states() <= request.limit else "."
    return f"{NOTHING}: {why}"


def as_rows(request: PlanRequest, strategies: list[Strategy]) -> list[dict]:
    """Return strategies, as `compare` returns them, as rows of a JSON file, in which None stands for what is not known.

    Speed-ups are over one device in the same precision, in whose memory everything fits. The MFU (model FLOPs
    utilisation) is the time that the model's matrix products and convolutions would take at the peak of the data sheet
    in that precision, without what is recomputed, over the step's. What doesn't fit has neither, nor has LoRA's row,
    since it computes less.
    """
    whole = [", bf16" in row.answer for row in strategies if row.fits and LORA not in row.answer]
    alone = {bf16: own.one_device(request, bf16) for bf16 in set(whole)}
    return [_as_row(request, row, *alone.get(", bf16" in row.answer, (None, None))) for row in strategies]


def _as_row(request, strategy, alone, at_peak):
    found, row = strategy.predicted, {"strategy": strategy.answer, "fits": strategy.fits}
    if found is None:
        return row | dict.fromkeys((*COUNTED, *TIMED, "flags"))
    row |= {
        "memory_mib": found.memory / MIB,
        "peaks_compared": _compared(PEAKS, strategy.answer),
        "stages_mib": [peak / MIB for peak in found.stages] or None,
        "messages_mib": found.sent / MIB,
        "sending_ms": 1000 * found.sending,
        "flags": found.flags or None,
    }
    if found.seconds is None:
        return row | dict.fromkeys(TIMED)
    per_second = request.batch * request.model.unit[1] / found.seconds
    hours = request.total and request.total / per_second / 3600 * request.devices
    is_whole = alone and strategy.fits and LORA not in strategy.answer
    return row | {
        "seconds": found.seconds,
        "spread": found.spread or None,
        "runs_compared": _runs(request, strategy.answer),
        "per_second": per_second,
        "mfu": at_peak / request.devices / found.seconds if is_whole else None,
        "speed_up": alone / found.seconds if is_whole else None,
        "gpu_hours": hours,
        "price": hours and request.price and hours * request.price,
    }


def table(request: PlanRequest, strategies: list[Strategy]) -> str:
    """Return the `strategies` for a `request`, as `compare` returns them, as text, a row each.

    Memory is what PyTorch allocates on the fullest device, and for a pipeline of at most eight stages on each of them,
    in order. Times are those of kernels that reach what `PlanRequest.efficiency` says, with the interval in which its
    spread puts them, and communication is hidden behind the computation but for a first gather or a last reduction,
    and inside blocks.
    """
    # a note says why there is no number
    rows = [row for row in as_rows(request, strategies) if row["memory_mib"]]
    for number, row in enumerate(rows):
        over = row["memory_mib"] - request.limit / MIB
        row["mark"] = "->" if number == 0 and row["fits"] else ""
        row["room"] = "yes" if row["fits"] else f"{over:,.0f} MiB over"
        row["peaks"] = "\n".join(f"{peak:,.0f}" for peak in row["stages_mib"] or [row["memory_mib"]])
        row["milliseconds"] = row["seconds"] and _milliseconds(row)
        row |= {name: "none" for name in ("peaks_compared", "runs_compared") if row[name] == 0}
    asked = {"gpu_hours": request.total, "price": request.price}
    columns = [name for name in COLUMNS if asked.get(name, True)]
    headers = [COLUMNS[name][0].format(unit=request.model.unit[0]) for name in columns]
    texts = [
        ["" if row[name] is None else COLUMNS[name][1].format(row[name]) for name in columns]
        for row in rows
    ]
    return _as_wide_as_the_terminal(
        texts, headers, ["left" if name in TEXTS else "right" for name in columns]
    )


def _milliseconds(row) -> str:
    """Return the milliseconds of a step, and their interval where one is known."""
    return f"{1000 * row['seconds']:,.1f}" + (f" ± {row['spread']:.0%}" if row["spread"] else "")


def _as_wide_as_the_terminal(rows, headers, alignment) -> str:
    """Return the rows as text, on a narrow terminal without the last columns."""
    for columns in range(len(headers), NEEDED - 1, -1):
        if "published" in "".join(headers[columns : columns + 1]):
            continue  # no time without what it was compared with
        shown = [row[:columns] for row in rows]
        text = tabulate(
            shown, headers[:columns], "simple", disable_numparse=True, colalign=alignment[:columns]
        )
        if terminal.width() is None or max(map(len, text.splitlines())) <= terminal.width():
            break
    more = [" ".join(header.split()) for header in headers[columns:]]
    return f"{text}\nA wider terminal, or --json, also has: {', '.join(more)}" if more else text

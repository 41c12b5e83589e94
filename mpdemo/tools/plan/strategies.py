"""Every strategy for one training in one table: whether it fits, what it needs, sends and takes.

    request = PlanRequest(OwnModel("my_file.py:my_function", (4096,), tokens=True), batch=512, devices=8)
    print(table(request, compare(request)))

``mpdemo plan`` prints this table. Taught in notebooks/72_which_one.ipynb.
"""

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.tools import terminal
from mpdemo.tools.plan import own
from mpdemo.tools.plan.request import NotPlanned, PlanRequest, Prediction, Rule, mib
from mpdemo.tools.plan.roof import MIB

# With how many published runs that chose no number, and how many peaks that a GPU measured, rows were compared,
# recomputed or not: a test counts them in tests/bench/published.toml. Rows of other kinds were compared with none.
RUNS = {
    "single": 2, "single, tf32": 2, "single, autocast": 8, "single, fp16": 1, "single, bf16": 1,
    "single, LoRA, bf16": 2, "ddp, tf32": 1, "ddp, autocast": 2, "ddp, bf16": 2, "fsdp, bf16": 29,
    "hsdp, bf16": 29, "tensor, bf16": 2, "fsdp x tensor, bf16": 2,
}  # fmt: skip
PEAKS = {"single": 3, "single, autocast": 5}
NEAR = (
    0.05  # of a peak: so far off were those that a GPU measured, so it decides nothing nearer to the limit
)
WIDE = 100  # characters of the table, if it isn't on a terminal
COLUMNS = {  # of a row as `as_rows` returns it -> header, and how a value is written
    "mark": ("", "{}"),
    "strategy": ("strategy", "{}"),
    "room": ("fits", "{}"),
    "peaks": ("peak\n(MiB)", "{}"),
    "runs_compared": ("runs", "{}"),  # no time without it
    "milliseconds": ("step\n(ms)", "{:,.1f}"),
    "compiled_ms": ("compiled\n(ms)", "{:,.1f}"),
    "between_ms": ("between\n(ms)", "{}"),
    "mfu": ("MFU", "{:.0%}"),
    "gpu_hours": ("GPU hours", "{:,.1f}"),
    "price": ("price\n(EUR)", "{:,.1f}"),
    "per_second": ("{unit}\nper second", "{:,.0f}"),
    "speed_up": ("speed-up", "{:.2f}"),
    "peaks_compared": ("measured\npeaks", "{}"),
    "messages_mib": ("bytes sent\n(MiB)", "{:,.0f}"),
    "sending_ms": ("communication\n(ms)", "{:,.1f}"),
    "flags": ("flags of\ntrain_gpt.py", "{}"),
}
# columns that are always shown; those that are no numbers
NEEDED, TEXTS = 4, ("mark", "strategy", "room", "flags")
# of a row of the JSON file: what it is called, what is counted, what is timed
KEYS = "strategy fits memory_mib peaks_compared stages_mib messages_mib sending_ms flags"
TIMES = "seconds compiled between runs_compared per_second mfu speed_up gpu_hours price"
LORA, OFFLOAD = ", LoRA", ", offload"
NOTHING = "none: more devices, or larger ones"


class Strategy(NamedTuple):
    """One way to train: its rule, whether it fits, what it needs; without that, the reason why it is not planned."""

    rule: Rule
    fits: str  # "yes", "perhaps" or "no"
    predicted: Prediction | None
    reason: str = ""

    @property
    def answer(self) -> str:
        """What the table calls it."""
        parts = self.predicted.parts if self.predicted and self.rule.mesh != "pipeline" else 1
        return self.rule.answer + (f", {parts} microbatches" if parts > 1 else "")


def compare(request: PlanRequest) -> list[Strategy]:
    """Return the strategies for a `request`: those that fit, the fastest first, then the others by memory.

    The order is that of estimates. LoRA, which trains something else, and what no data sheet gives a time come after
    what fits besides. Without `request.everything` some are not planned: offload where anything else fits, and what is
    partly recomputed where it isn't the only one to fit.

    Raises
    ------
    UserError
        The nodes do not divide the devices, or every device could hold the model but the batch does not divide.
    """
    _check(request)
    found = {}
    for rule in own.rules_of(request):
        if request.everything or _may_help(rule, found):
            request.progress(rule.answer)
            found[rule.answer] = _planned(request, rule)
    return sorted(found.values(), key=_place)


def shown(request: PlanRequest, strategies: list[Strategy]) -> list[Strategy]:
    """Return what is printed: without `request.everything` only what no other one beats in memory and in time."""
    beaten = [row for row in strategies if any(_beats(other, row) for other in strategies)]
    return [row for row in strategies if request.everything or row not in beaten]


def _may_help(rule, found) -> bool:
    """Return whether a way may be better than those that were found so far."""
    if OFFLOAD in rule.mesh:
        others = [
            row for row in found.values() if LORA not in row.rule.mesh and OFFLOAD not in row.rule.mesh
        ]
        if any(row.fits == "yes" for row in others):
            return False
    if rule.again != own.PARTLY:
        return True
    plain, twice = (found[rule.kind + again] for again in ("", own.RECOMPUTED))
    return plain.fits == "no" and twice.fits != "no"


def _planned(request, rule) -> Strategy:
    """Plan one way; near the limit, or if it fits with fused kernels alone, the answer is "perhaps"."""
    try:
        found = own.with_times(request, rule.find)
    except NotPlanned as error:
        return Strategy(rule, "no", None, str(error))
    if found.memory > request.limit >= found.memory * (1 - 0.35) and not request.compiled:
        with suppress(NotPlanned):  # of the compiled step alone
            fused = rule.find(replace(request, compiled=True)).memory
            found = found._replace(fused=fused if fused <= request.limit else None)
    near = abs(found.memory / request.limit - 1) < NEAR
    fits = "perhaps" if near or found.fused else "yes" if found.memory <= request.limit else "no"
    return Strategy(rule, fits, found)


def _beats(one, other) -> bool:
    """Return whether one way needs less memory and less time than another; of equal ones, the first does."""
    a, b = one.predicted, other.predicted
    if not (a and b) or one is other or (LORA in one.rule.mesh) is not (LORA in other.rule.mesh):
        return False
    if one.rule.precision != other.rule.precision or None in (a.seconds, b.seconds):
        return False
    return (
        (a.memory, a.seconds) != (b.memory, b.seconds) and a.memory <= b.memory and a.seconds <= b.seconds
    )


def _runs(request, rule) -> int:
    """Return how many published runs a row's time was compared with: none, if no kernel of the GPU was measured."""
    return RUNS.get(rule.kind, 0) if any(request.efficiency.spreads) else 0


def _place(strategy) -> tuple:
    """Return what the strategies are sorted by."""
    found, fits = strategy.predicted, ("yes", "perhaps", "no").index(strategy.fits)
    if strategy.fits == "no":
        return 3, found.memory if found else float("inf")
    return (2, fits) if LORA in strategy.rule.mesh or found.seconds is None else (fits, found.seconds)


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
    rule, fits, found, _ = strategies[0]
    if fits != "no" and found:
        why = rule.why.format(devices=request.devices)
        first = f"{strategies[0].answer}: {why}: {mib(found.memory)} of {mib(request.limit)} per device."
        if fits == "perhaps":
            first = first.replace(": ", " perhaps fits: ", 1)
        if found.seconds is None or LORA in rule.mesh:
            return first
        runs = _runs(request, rule)
        compared = f"such rows were compared with {runs or 'no'} published run{'s' * (runs > 1)}"
        return f"{first} Its estimated step is the shortest of those that fit and train all weights; {compared}."
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
    whole = [row for row in strategies if row.fits != "no" and LORA not in row.rule.mesh]
    alone = {name: own.one_device(request, name) for name in {row.rule.precision for row in whole}}
    none = None, None
    return [
        _as_row(request, row, *(alone[row.rule.precision] if row in whole else none)) for row in strategies
    ]


def _as_row(request, strategy, alone, at_peak):
    found, row = strategy.predicted, dict.fromkeys(f"{KEYS} {TIMES}".split())
    row |= {"strategy": strategy.answer, "fits": strategy.fits}
    if found is None:
        return row
    row |= {
        "memory_mib": found.memory / MIB,
        "peaks_compared": PEAKS.get(strategy.rule.kind, 0),
        "stages_mib": [peak / MIB for peak in found.stages] or None,
        "messages_mib": found.sent / MIB,
        "sending_ms": 1000 * found.sending,
        "flags": found.flags or None,
    }
    if found.seconds is None:
        return row
    seconds, runs = found.compiled if request.compiled else found.seconds, _runs(request, strategy.rule)
    per_second = request.batch * request.model.unit[1] / seconds
    hours = request.total and request.total / per_second / 3600 * request.devices
    return row | {
        "seconds": found.seconds,
        "compiled": found.compiled,
        "between": found.between if runs else None,
        "runs_compared": runs,
        "per_second": per_second,
        "mfu": alone and at_peak / request.devices / seconds,
        "speed_up": alone and alone / found.seconds,
        "gpu_hours": hours,
        "price": hours and request.price and hours * request.price,
    }


def table(request: PlanRequest, strategies: list[Strategy]) -> str:
    """Return the `strategies` for a `request`, as `compare` returns them, as text, a row each.

    Memory is what PyTorch allocates on the fullest device, and for a pipeline of at most eight stages on each of them,
    in order. Times are those of kernels that reach what `PlanRequest.efficiency` says, and between which they may be.
    """
    # a note says why there is no number
    rows = [row for row in as_rows(request, strategies) if row["memory_mib"]]
    for number, row in enumerate(rows):
        over = row["memory_mib"] - request.limit / MIB
        row["mark"] = "->" if number == 0 and row["fits"] != "no" else ""
        row["room"] = f"{over:,.0f} over" if row["fits"] == "no" else row["fits"]
        row["peaks"] = "\n".join(f"{peak:,.0f}" for peak in row["stages_mib"] or [row["memory_mib"]])
        row["milliseconds"], row["compiled_ms"] = (
            row[name] and 1000 * row[name] for name in ("seconds", "compiled")
        )
        row["between_ms"] = row["between"] and " to ".join(f"{1000 * end:,.0f}" for end in row["between"])
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


def _as_wide_as_the_terminal(rows, headers, alignment) -> str:
    """Return the rows as text, without the last columns where they don't fit."""
    for columns in range(len(headers), NEEDED - 1, -1):
        shown = [row[:columns] for row in rows]
        text = tabulate(
            shown, headers[:columns], "simple", disable_numparse=True, colalign=alignment[:columns]
        )
        if max(map(len, text.splitlines())) <= (terminal.width() or WIDE):
            break
    more = [" ".join(header.split()) for header in headers[columns:]]
    return f"{text}\nA wider terminal, or --json, also has: {', '.join(more)}" if more else text

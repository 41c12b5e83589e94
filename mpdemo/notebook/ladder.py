"""The ladder so far: one row for each strategy that was timed. Every notebook of the course adds its own.

A row is read from ``runs/speed_RUNG``, where a job timed the strategy alternately with the single device.
"""

import json

from tabulate import tabulate

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.measure.paired import from_row
from mpdemo.measure.timeline import waiting
from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.timeline import WAITING, in_milliseconds, legend_handles, paint_step
from mpdemo.notebook.show import Bundle
from mpdemo.settings import RUNGS

MIB = 2**20
COLUMNS = 5  # of the legend
MEMORY = {  # part of a device's memory: its look; colours are for operations
    "weights": {"facecolor": "#707070"} | style.EDGE,
    "gradients": {"facecolor": style.PAPER, "hatch": "\\\\\\\\"} | style.EDGE,
    "optimizer": {"facecolor": "#b8b8b8", "hatch": "...."} | style.EDGE,
    "activations": {"facecolor": "#e2e2e2"} | style.EDGE,
}
LANE = 0.36  # inches per device
TIMED = [rung for rung in RUNGS if rung != "hybrid"]  # whose four ranks on two cores would time the cores
SHARE_THE_WORK = "data_parallel", "ddp", "fsdp", "tensor"  # limited by processes that do not talk
HEADINGS = (
    "strategy",
    "devices",
    "step (ms)",
    "speed-up",
    "upper bound",
    "fraction of bound",
    "MiB per device",
)
FOOT = (
    "Step: the median step of the single device and of the strategy, timed alternately in one job. Speed-up: the "
    "median of the rounds' paired ratios, with its 95 % interval in brackets; the quotient of the two medians can "
    "differ from it. Upper bound: the best possible speed-up on this machine, as measured. For "
    f"{', '.join(SHARE_THE_WORK[:-1])} and {SHARE_THE_WORK[-1]} it is the speed-up of processes that never "
    "communicate, as a range over all jobs that measured it; for a split model, the schedule is simulated with the "
    "measured operations. Fraction of bound: a paired ratio of its own, within one job; a strategy is reported as "
    "slower than its bound only if the interval lies below 1. Fewer than 6 rounds give no interval. Memory: the peak "
    "of a step, computed."
)


def ladder_table() -> Bundle:
    """Show one row for each strategy that was timed, in text and HTML; name the others.

    The numbers are measured: a notebook's cell that shows this table is not compared from run to run.
    """
    rows = timed_rows()
    shared = [row["bound"] for row in rows if row["rung"] in SHARE_THE_WORK]
    texts = []
    for row in rows:
        speed = ["-"] * 3
        if row["rung"] != "single":
            bounds = shared if row["rung"] in SHARE_THE_WORK else [row["bound"]]
            ends = dict.fromkeys(f"{bound:.2f}" for bound in (min(bounds), max(bounds)))
            speed = [from_row(row, "speedup"), " to ".join(ends), from_row(row, "fraction_of_bound")]
        texts.append(
            [row["strategy"], row["devices"], step_text(row), *speed, ", ".join(memory_texts(row))]
        )
    missing = [rung for rung in TIMED if rung not in {row["rung"] for row in rows}]
    notes = [FOOT, *(row["note"] for row in rows if row["note"])]
    if missing:
        notes.insert(0, f"Not timed yet, by measure(NAME): {', '.join(missing)}.")
    align = ["left"] + ["right"] * (len(HEADINGS) - 1)
    plain, html = (
        tabulate(texts, HEADINGS, look, colalign=align, disable_numparse=True) for look in ("plain", "html")
    )
    return Bundle("\n".join([plain, *notes]), html=html + "".join(f"<p>{note}</p>" for note in notes))


def step_text(row) -> str:
    """Return the single device's median step and this strategy's, in ms, from the same job."""
    steps = [f"{1e3 * row[name]:.0f}" for name in ("single_seconds", "step_seconds")]
    return steps[1] if row["rung"] == "single" else " → ".join(steps)


def memory_texts(row) -> list[str]:
    """Return the peak of every device in MiB."""
    return [f"{sum(device[part] for part in MEMORY) / MIB:.0f}" for device in row["memory"]]


def in_words(row) -> str:
    """Say in a line what was measured: whether a strategy is slower than its upper bound, but not why."""
    if not is_current(row):
        old = f"runs/speed_{row['rung']} was measured by an earlier version, without a 95 % interval"
        raise UserError(f"{old}; do: measure it again, with resubmit=True")
    if row["rung"] == "single":
        ends = [f"{1e3 * seconds:.0f}" for seconds in row["step_seconds_interval"] or ()]
        spread = f" (95 % interval {' to '.join(ends)})" if ends else ""
        return f"single: {step_text(row)} ms per step{spread}."
    speed, bound, fraction = (from_row(row, name) for name in ("speedup", "bound", "fraction_of_bound"))
    said = "no shortfall from the bound can be reported" if row["at_bound"] else "slower than the bound"
    said = said if fraction.interval else "fewer than 6 rounds, so no interval and no verdict"
    figures = f"speed-up {speed}, upper bound {bound}, fraction of the upper bound {fraction}"
    return f"{row['strategy']}: {figures}; {said}."


def ladder_chart() -> Bundle:
    """Show a step of each strategy that was timed, on one time axis, and beside it the peak memory of every device."""
    rows = [row | {"timeline": as_long_as_timed(row)} for row in timed_rows()]
    longest = max(operation["end"] for row in rows for operation in row["timeline"])

    def paint(sheet, grid):
        for (time, memory), row in zip(grid, rows, strict=True):
            paint_step(time, headline(row), row["timeline"], longest, "device")
            parts = [
                ([device[part] / MIB for device in row["memory"]], look) for part, look in MEMORY.items()
            ]
            bars = style.stack(memory, range(row["devices"]), parts, 0.8)
            memory.bar_label(bars, memory_texts(row), padding=3, fontsize=8)
            memory.set(ylim=(row["devices"] - 0.5, -0.5), yticks=[])
        memory.set_xlim(0, 1.22 * max(map(float, (text for row in rows for text in memory_texts(row)))))
        time.set_xlabel("a profiled step, drawn as long as the median step (ms)")
        memory.set_xlabel("peak memory (MiB)")
        _add_legend(sheet, rows)

    ratios = {
        "height_ratios": [row["devices"] + 0.4 for row in rows],
        "width_ratios": [3, 1],
        "sharex": "col",
    }
    height = 1.35 + sum(0.42 + LANE * row["devices"] for row in rows)
    text = "the ladder so far: a step of each strategy on one time axis, and the memory of every device"
    alt = "; ".join(
        f"{headline(row)}{waits_of(row)}, peak memory (MiB) {', '.join(memory_texts(row))}" for row in rows
    )
    return style.picture(paint, text, alt, 8.6, height, len(rows), 2, squeeze=False, **ratios)


def as_long_as_timed(row) -> list[dict]:
    """Return the timeline in ms, scaled to the timed step: the profiler slows down some strategies more than others."""
    scale = row["step_seconds"] / max(operation["end"] for operation in row["timeline"])
    return in_milliseconds(row["timeline"], scale)


def waits_of(row) -> str:
    """Say how long a device computes nothing in the step that is drawn in ms, the mean of all, and why."""
    seen = waiting(row["timeline"])
    times = {
        kind: sum(w["end"] - w["start"] for w in seen if w["kind"] == kind) / row["devices"]
        for kind in WAITING
    }
    return "".join(f", {WAITING[kind][0]} {time:.0f} ms" for kind, time in times.items() if time >= 0.5)


def _add_legend(sheet, rows):
    """Explain the colours: of the operations first, then of the memory, line by line."""
    line = legend_handles([row["timeline"] for row in rows], **style.EDGE)
    if any(operation.get("stage", 0) >= row["devices"] for row in rows for operation in row["timeline"]):
        line += style.patches([("paler: later stage", {"facecolor": style.PAPER})], **style.EDGE)
    memory = style.patches((f"memory: {part}", look) for part, look in MEMORY.items())
    handles = [*line, *memory]
    # as matplotlib fills it
    by_column = [handle for column in range(COLUMNS) for handle in handles[column::COLUMNS]]
    sheet.legend(handles=by_column, loc="outside lower center", ncols=COLUMNS, fontsize=8)


def headline(row) -> str:
    """Return a strategy's line: its step after the single device's, and how close the speed-up is to its bound."""
    schedule = f" ({row['schedule']}, M = {row['microbatches']})" if "schedule" in row else ""
    name = f"{row['strategy']}{schedule}, {row['devices']} device{'s' if row['devices'] > 1 else ''}"
    speed = f", speed-up {row['speedup']:.2f} ({row['fraction_of_bound']:.2f} of the upper bound)"
    return f"{name}: {step_text(row)} ms per step{speed if row['rung'] != 'single' else ''}"


def timed_rows() -> list[dict]:
    """Return the rows of all strategies that were timed, in the order of the ladder."""
    timed = {}
    for rung in reversed(TIMED):  # the single device is timed beside each; its own job has the last word
        file = paths.root() / "runs" / f"speed_{rung}" / "summary.json"
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        timed.update({row["rung"]: row for row in rows if is_current(row)})
    if not timed:
        raise UserError("nothing was timed yet; call measure('ddp'), which times the single device as well")
    return [timed[rung] for rung in TIMED if rung in timed]


def is_current(row) -> bool:
    """Whether a row has its 95 % intervals; those of earlier versions of the course had not."""
    return "speedup_interval" in row

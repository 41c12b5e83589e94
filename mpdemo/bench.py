"""``python -m mpdemo bench``: the course's speed figures, each beside its upper bound: the tables of tests/README.md.

Every figure is a median of paired ratios (paired.py) from runs that alternate in one call: strategies beside the single
device, what `mpdemo.plan` predicts beside what is measured, training loops beside a bare one. Use an idle machine.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from tabulate import tabulate

from mpdemo.demo import speed_texts
from mpdemo.notebook.recipe import equal_cut
from mpdemo.paired import ROUNDS, from_row, ratio, to_row
from mpdemo.schedules import SCHEDULES
from mpdemo.settings import Settings
from mpdemo.world.devices import gpus_here, take_devices, too_few_gpus
from mpdemo.world.launch import end, start
from mpdemo.world.processes import check_room

PROCESSES = {"ddp": 2, "pipeline": 2, "hybrid": 4, "memory": 2, "step_times": 2, "loop": 1}  # of each part
COUNTS, NAIVE = (2, 4, 8, 16), "naive"  # numbers of microbatches; what pipelines are compared with
SETTINGS = "model", "image_size", "batch_size", "schedule", "microbatches"  # that a row holds
LABS = {"memory": "predictions", "step_times": "step_times", "loop": "lightning_overhead"}  # others: strategies
SPEEDS = "comparison", "measured", "upper bound", "fraction of the upper bound"  # headings of a table
ERRORS = "prediction", "error", "promised"
RUNS = "runs of the course model on two processes: median and largest error"


def add_arguments(parser):
    """Add the options of ``bench``."""
    parser.add_argument("--out", default="runs/bench", metavar="DIR", help="where the results go")
    parser.add_argument("--only", action="append", choices=PROCESSES, help="a part to run (default: all)")


def main(args) -> int:
    """Run the parts one after the other; print the tables, and save them with all numbers in bench.json."""
    check_room(2)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    report, tables = {"machine": take_devices(2) | {"rounds": ROUNDS}, "results": {}}, {}
    print(f"A device here is {report['machine']['device']}.")
    for part in args.only or PROCESSES:
        if too_few_gpus(PROCESSES[part]):
            print(f"{part} is left out: {PROCESSES[part]} processes for {gpus_here()} GPUs")
            continue
        if status := run(part, out / part):
            return status
        result = report["results"][part] = json.loads((out / part / "summary.json").read_text())
        for headings, *line in FIGURES.get(part, strategies)(result):
            tables.setdefault(headings, []).append(line)
        (out / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    for headings, lines in tables.items():
        print(tabulate(lines, headings, "github", disable_numparse=True), end="\n\n")
    return 0


def run(part, folder) -> int:
    """Run one part in its processes; return their exit status."""
    command = ["-m", f"mpdemo.labs.{LABS[part]}"] if part in LABS else ["-m", "mpdemo.bench", part]
    with tempfile.TemporaryDirectory(prefix="mpdemo-bench-") as scratch:
        os.environ["TMPDIR"] = scratch  # where the processes make theirs: a killed one cannot remove it
        return start([*command, str(folder)], PROCESSES[part])


def cases(part) -> list[dict]:
    """Return the comparisons of a part: settings by name, "single" the first."""
    single = partial(Settings, rung="single")
    transformer = single(model="transformer", image_size=28, batch_size=256, optimizer="adamw")
    resnet18 = single(model="resnet18", image_size=64, batch_size=64)
    resnet50, resnet101 = (single(model=f"resnet{n}", image_size=128, batch_size=32) for n in (50, 101))
    if part == "ddp":
        names = {"ddp": "DDP", "fsdp": "FSDP", "tensor": "tensor parallel"}
        rungs = [(resnet18, ["ddp"]), (resnet50, ["ddp"]), (transformer, names)]
        return [{"single": plain} | {names[rung]: replace(plain, rung=rung) for rung in more} for plain, more in rungs]
    if part == "hybrid":
        hybrid = replace(transformer, rung="hybrid", replicas=2, schedule="1F1B", microbatches=4, cut=equal_cut(2))
        return [{"single": transformer, "two replicas of a pipeline (four processes), 1F1B, 4 microbatches": hybrid}]
    variants = [
        {"single": plain, NAIVE: replace(plain, rung="model_parallel", cut=equal_cut(2))}
        | schedules(replace(plain, rung="pipeline"), COUNTS)
        for plain in (single(model="convstack", image_size=32, batch_size=64, norm="group"), transformer)
    ]
    cut = replace(resnet101, rung="pipeline", schedule="1F1B", microbatches=8)
    cuts = {f"1F1B, 8 microbatches, split after {place}": replace(cut, cut=place) for place in ("layer2.3", "layer3.6")}
    return [*variants, {"single": resnet101} | cuts]


def schedules(settings, counts) -> dict:
    """Return the settings of every schedule, on equal stages, with some numbers of microbatches."""
    cuts = {name: equal_cut(2 * schedule.stages_per_rank) for name, schedule in SCHEDULES.items()}
    return {
        f"{name}, {count} microbatches": replace(settings, schedule=name, microbatches=count, cut=cut)
        for count in counts
        for name, cut in cuts.items()
    }


def measure(part, out):
    """Run under torchrun: time all variants of each case alternately; rank 0 writes the rows."""
    from mpdemo.compare import compare, measured_rows, write_result

    def rows_of(world):
        rows, seconds = [], []
        for variants in cases(part):
            comparison = compare(variants, world)
            comparison.run(ROUNDS, title=variants["single"].model)
            seconds.append(comparison.seconds)
            for (name, s), measured in zip(variants.items(), measured_rows(comparison, variants), strict=True):
                row = {"variant": name} | {setting: getattr(s, setting) for setting in SETTINGS} | measured
                if NAIVE in variants:
                    row |= to_row("over_naive", ratio(comparison.seconds[NAIVE], comparison.seconds[name]))
                rows.append(row)
        return {"rows": rows, "seconds": seconds}

    write_result(out, rows_of)


def strategies(result) -> list:
    """Return the lines of strategies beside the single device, and of pipelines beside the unpipelined split model.

    Each line, here and below, begins with the headings of its table.
    """
    rows = [row for row in result["rows"] if row["variant"] not in ("single", NAIVE)]
    name = "{variant}; {model}, {image_size} px, batch {batch_size}: speed-up".format
    lines = [(SPEEDS, name(**row), *speed_texts(row)) for row in rows if "over_naive" not in row]
    pipelines = [row for row in rows if "over_naive" in row]
    for model in dict.fromkeys(row["model"] for row in pipelines):
        lines += over_naive([row for row in pipelines if row["model"] == model])
    return lines


def over_naive(rows) -> list:
    """Return the lines of a model's pipelines: one for each schedule, a column for each number of microbatches."""
    name = "{model}, {image_size} px, batch {batch_size}: speed-up over naive, fraction of the upper bound".format
    headings = name(**rows[0]), *(f"{count} microbatches" for count in COUNTS)
    lines = {row["schedule"]: [headings, row["schedule"]] for row in rows}
    for row in rows:
        lines[row["schedule"]].append(f"{from_row(row, 'over_naive')}, {row['fraction_of_bound']:.2f}")
    paper = headings, "on paper: GPipe and 1F1B, equal stages, 2M/(M+1)", *(f"{2 * m / (m + 1):.2f}" for m in COUNTS)
    return [*lines.values(), paper]


def memory(result) -> list:
    """Return the lines of predicted memory and messages."""
    rows = result["rows"]
    off = [max(abs(p / c - 1) for p, c in zip(r["predicted"], r["counted"], strict=True)) for r in rows]
    equal = sum(row["messages"] == row["predicted_messages"] for row in rows)
    return [
        (
            ERRORS,
            f"peak memory per device, {len(rows)} {RUNS}",
            f"{100 * median(off):.1f} %, {100 * max(off):.1f} %",
            "5 %",
        ),
        (ERRORS, "messages of these runs, to the byte", f"{equal} of {len(rows)} right", "all"),
    ]


def step_times(result) -> list:
    """Return the line of predicted step times."""
    off = [abs(row["ratio"] - 1) for row in result["rows"] if not row["case"].startswith("--rung single")]
    error = f"{100 * median(off):.0f} %, {100 * max(off):.0f} %"
    return [(ERRORS, f"step time, {len(off)} {RUNS}", error, "10 % in the median")]


def loop(result) -> list:
    """Return the lines of what a training loop adds to a step."""
    lines = []
    for name, row in result["added"].items():
        added, low, high = (f"{1e6 * seconds:.0f}" for seconds in (row["seconds"], *row["seconds_interval"]))
        of_step = f"{100 * row['seconds'] / result['course_seconds']:.1f} % of a step of the course model"
        lines.append((SPEEDS, f"what {name} adds to a step of a bare one", f"{added} ({low} to {high}) µs, {of_step}"))
    return lines


FIGURES = {"memory": memory, "step_times": step_times, "loop": loop}  # the other parts: `strategies`

if __name__ == "__main__":
    end(measure(*sys.argv[1:]))

"""``python -m mpdemo bench``: the course's speed figures, each beside its limit, in one table and one JSON file.

Every figure is a ratio of medians from runs that alternate in one call: strategies beside the single device, what
`mpdemo.plan` predicts beside what is measured, training loops beside a bare one. Run it on an idle machine.
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
from mpdemo.schedules import SCHEDULES
from mpdemo.settings import Settings
from mpdemo.world.devices import gpus_here, take_devices, too_few_gpus
from mpdemo.world.launch import end, start
from mpdemo.world.processes import check_room

ROUNDS = 9  # of each strategy
PROCESSES = {"ddp": 2, "pipeline": 2, "hybrid": 4, "memory": 2, "step_times": 2, "loop": 1}  # of each part
LABS = {"memory": "predictions", "step_times": "step_times", "loop": "lightning_overhead"}  # others: strategies


def add_arguments(parser):
    """Add the options of ``bench``."""
    parser.add_argument("--out", default="runs/bench", metavar="DIR", help="where the results go")
    parser.add_argument("--only", action="append", choices=PROCESSES, help="a part to run (default: all)")


def main(args) -> int:
    """Run the parts one after the other; print one table, and save it with all numbers in bench.json."""
    check_room(2)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    report = {"machine": take_devices(2) | {"rounds": ROUNDS}, "results": {}, "table": []}
    print(f"A device here is {report['machine']['device']}.")
    for part in args.only or PROCESSES:
        if too_few_gpus(PROCESSES[part]):
            print(f"{part} is left out: {PROCESSES[part]} processes for {gpus_here()} GPUs")
            continue
        if status := run(part, out / part):
            return status
        result = report["results"][part] = json.loads((out / part / "summary.json").read_text())
        report["table"] += FIGURES.get(part, strategies)(result)
        (out / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    headings = ["comparison", "measured", "limit", "share of the limit"]
    print(tabulate(report["table"], headings, "github", disable_numparse=True))
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
        rungs = [(resnet18, ["ddp"]), (resnet50, ["ddp"]), (transformer, ["ddp", "fsdp", "tensor"])]
        return [{"single": plain} | {rung: replace(plain, rung=rung) for rung in more} for plain, more in rungs]
    if part == "hybrid":
        return [{"single": transformer} | schedules(replace(transformer, rung="hybrid", replicas=2), [4])]
    variants = [
        {"single": plain, "naive": replace(plain, rung="model_parallel", cut=equal_cut(2))}
        | schedules(replace(plain, rung="pipeline"), (2, 4, 8, 16))
        for plain in (single(model="convstack", image_size=32, batch_size=64, norm="group"), transformer)
    ]
    cut = replace(resnet101, rung="pipeline", schedule="1F1B", microbatches=8)
    usual_and_balanced = {f"1F1B, 8 microbatches, cut after {c}": replace(cut, cut=c) for c in ("layer2.3", "layer3.6")}
    return [*variants, {"single": resnet101} | usual_and_balanced]


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
        rows = []
        for variants in cases(part):
            comparison = compare(variants, world)
            comparison.run(ROUNDS, title=variants["single"].model)
            measured = measured_rows(comparison, variants)
            rows += [
                {"variant": name, "model": s.model, "image_size": s.image_size, "batch_size": s.batch_size} | row
                for (name, s), row in zip(variants.items(), measured, strict=True)
            ]
        return {"rows": rows}

    write_result(out, rows_of)


def strategies(result) -> list:
    """Return the table's rows of strategies beside the single device."""
    what = "{model}, {image_size} px, batch {batch_size}: {variant}, {processes} processes; times one device"
    return [(what.format(**row), *speed_texts(row)) for row in result["rows"] if row["variant"] != "single"]


def memory(result) -> list:
    """Return the table's rows of predicted memory and messages."""
    rows = result["rows"]
    off = [max(abs(p / c - 1) for p, c in zip(r["predicted"], r["counted"], strict=True)) for r in rows]
    equal = sum(row["messages"] == row["predicted_messages"] for row in rows)
    peaks = f"off by {median(off):.1%}, at most {max(off):.1%}"
    return [
        (f"predicted peak memory of {len(rows)} runs", peaks, "5 %", ""),
        ("their messages, to the byte", f"{equal} of {len(rows)}", "all", ""),
    ]


def step_times(result) -> list:
    """Return the table's row of predicted step times."""
    off = [abs(row["ratio"] - 1) for row in result["rows"] if not row["case"].startswith("--rung single")]
    error = f"off by {median(off):.0%}, at most {max(off):.0%}"
    return [(f"predicted step time of {len(off)} runs", error, "10 %", "")]


def loop(result) -> list:
    """Return the table's rows of what a training loop adds to a step."""
    step = result["course_seconds"]
    rows = result["added_seconds"].items()
    of = "of a step of the course model"
    return [(f"{name}, over a bare loop", f"{s * 1e6:.0f} µs a step, {s / step:.1%} {of}", "", "") for name, s in rows]


FIGURES = {"memory": memory, "step_times": step_times, "loop": loop}  # the other parts: `strategies`

if __name__ == "__main__":
    end(measure(*sys.argv[1:]))

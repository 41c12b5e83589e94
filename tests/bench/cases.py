"""The strategies that `make bench` compares, and the program that times them: ``cases.py PART FOLDER``.

bench.py starts it in as many processes as the part has; rank 0 writes ``summary.json`` in the folder.
"""

import sys
from dataclasses import replace
from functools import partial

from mpdemo.measure.compare import compare, measured_rows, write_result
from mpdemo.measure.paired import ROUNDS, ratio, to_row
from mpdemo.settings import Settings, equal_cut
from mpdemo.settings.schedules import SCHEDULES
from mpdemo.world.processes import end

PROCESSES = {"ddp": 2, "pipeline": 2, "hybrid": 4}  # of each part
COUNTS = (2, 4, 8, 16)  # numbers of microbatches
NAIVE = "naive"  # the split model without a pipeline, with which pipelines are compared
SETTINGS = "model", "image_size", "batch_size", "schedule", "microbatches"  # that a row holds


def cases(part) -> list[dict]:
    """Return the comparisons of a part: settings by name, "single" the first."""
    single = partial(Settings, rung="single", optimizer="sgd")
    transformer = single(model="transformer", image_size=28, batch_size=256, optimizer="adamw")
    resnet18 = single(model="resnet18", image_size=64, batch_size=64)
    resnet50, resnet101 = (single(model=f"resnet{n}", image_size=128, batch_size=32) for n in (50, 101))
    if part == "ddp":
        names = {"ddp": "DDP", "fsdp": "FSDP", "tensor": "tensor parallel"}
        rungs = [(resnet18, ["ddp"]), (resnet50, ["ddp"]), (transformer, names)]
        return [
            {"single": plain} | {names[rung]: replace(plain, rung=rung) for rung in more}
            for plain, more in rungs
        ]
    if part == "hybrid":
        hybrid = replace(
            transformer, rung="hybrid", replicas=2, schedule="1F1B", microbatches=4, cut=equal_cut(2)
        )
        return [
            {
                "single": transformer,
                "two replicas of a pipeline (four processes), 1F1B, 4 microbatches": hybrid,
            }
        ]
    variants = [
        {"single": plain, NAIVE: replace(plain, rung="model_parallel", cut=equal_cut(2))}
        | schedules(replace(plain, rung="pipeline"), COUNTS)
        for plain in (single(model="convstack", image_size=32, batch_size=64, norm="group"), transformer)
    ]
    cut = replace(resnet101, rung="pipeline", schedule="1F1B", microbatches=8)
    cuts = {
        f"1F1B, 8 microbatches, split after {place}": replace(cut, cut=place)
        for place in ("layer2.3", "layer3.6")
    }
    return [*variants, {"single": resnet101} | cuts]


def schedules(settings, counts) -> dict:
    """Return the settings of every schedule, on equal stages, with some numbers of microbatches."""
    cuts = {name: equal_cut(2 * schedule.stages_per_rank) for name, schedule in SCHEDULES.items()}
    return {
        f"{name}, {count} microbatches": replace(settings, schedule=name, microbatches=count, cut=cut)
        for count in counts
        for name, cut in cuts.items()
    }


def measure(part, world) -> dict:
    """Time all variants of each case alternately; every rank must call this."""
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


if __name__ == "__main__":
    part, folder = sys.argv[1:]
    end(write_result(folder, partial(measure, part)))

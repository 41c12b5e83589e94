"""The measurements behind ``python -m mpdemo bench``, run under torchrun; each gives the rows of one table."""

import json
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from mpdemo import data
from mpdemo.bench.pipelines import hybrid, pipeline, planner
from mpdemo.compare import Comparison, join_world, quartiles
from mpdemo.labs import predictions, step_times
from mpdemo.labs.bare_loop import bare_epoch
from mpdemo.settings import Settings, checked
from mpdemo.training.build import build
from mpdemo.training.loop import Run
from mpdemo.world.launch import end

SHARED = (  # model, pixels per side, batch, rungs that share the arithmetic among all processes
    ("resnet18", 64, 64, ("ddp",)),
    ("resnet50", 128, 32, ("ddp",)),
    ("transformer", 28, 256, ("ddp", "fsdp", "tensor")),
)


def ddp(world, rounds):
    """DDP, FSDP and tensor parallelism with two processes against two independent processes, and against one."""
    rows = []
    for model, size, batch, rungs in SHARED:
        optimizer = "adamw" if model == "transformer" else "sgd"
        single = Settings(rung="single", model=model, image_size=size, batch_size=batch, optimizer=optimizer)
        comparison = Comparison(world)
        comparison.add("single", single)
        comparison.add("independent", replace(single, batch_size=batch // world.world_size), everywhere=True)
        for rung in rungs:
            comparison.add(rung, replace(single, rung=rung))
        comparison.run(rounds)
        rows += [shared_row(comparison, rung, single) for rung in rungs]
    return rows


def shared_row(comparison, rung, settings):
    """One row: a rung over the single device, and over processes that do not speak to each other."""
    speedup, *speedup_quartiles = comparison.ratio("single", rung)
    share, *share_quartiles = comparison.ratio("independent", rung)
    return {
        "rung": rung,
        "model": settings.model,
        "image_size": settings.image_size,
        "batch": settings.batch_size,
        "processes": comparison.world.world_size,
        "speedup": speedup,
        "speedup_quartiles": speedup_quartiles,
        "bound": comparison.ratio("single", "independent")[0],
        "fraction_of_bound": share,
        "fraction_quartiles": share_quartiles,
    }


def loop(world, rounds):
    """The training loop against a bare loop with the same work, epoch by epoch in turn.

    What the loop adds to a step does not depend on the model, so it is measured on a toy, whose steps are short; on
    the ConvNet it is smaller than the noise.
    """
    rows = [loop_row(world, "toy", 20 * rounds), loop_row(world, "convnet", 4 * rounds)]
    return [row | {"added_share": rows[0]["added_seconds"] * row["steps"] / row["bare_seconds"]} for row in rows]


def loop_row(world, model, epochs):
    """Measure one model: seconds per epoch with and without the loop, and what the loop adds to a step."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-bench-") as folder:
        settings = checked(Settings(rung="single", model=model, norm="group", epochs=10_000, out=folder))
        dataset, rung, optimizer = build(settings, world)
        loaders = data.Loaders(dataset, settings.batch_size)
        run = Run(settings, world, rung, optimizer, loaders)
        run.validate = lambda: (0.0, 0.0)  # the bare loop does not validate
        run.start_bar(disable=True)
        comparison = Comparison(world)
        for name, epoch in (("bare", bare_epoch(dataset, rung.model, settings)), ("loop", run.one_epoch)):
            comparison.trials[name] = SimpleNamespace(step=epoch, devices=(), all_cores=False)
        with redirect_stdout(None):  # the loop prints a line per epoch
            comparison.run(epochs)
        run.log.file.close()
    bare, steps = comparison.seconds["bare"], loaders.steps_per_epoch
    added = [(a - b) / steps for a, b in zip(comparison.seconds["loop"], bare, strict=True)]
    ratio, *ratio_quartiles = comparison.ratio("loop", "bare")
    return {
        "model": model,
        "steps": steps,
        "bare_seconds": median(bare),
        "loop_over_bare": ratio,
        "quartiles": ratio_quartiles,
        "added_seconds": median(added),
        "added_quartiles": quartiles(added),
    }


def memory(world, rounds):
    """What every device holds and sends in a step of the story, predicted and counted; nothing is timed."""
    rows = predictions.measure(world, predictions.CASES[world.world_size], 64)
    if world.rank:
        return []
    return [
        {
            "case": row["case"],
            "predicted": max(row["predicted"]),
            "counted": max(row["counted"]),
            "off_by": max(abs(p / c - 1) for p, c in zip(row["predicted"], row["counted"], strict=True)),
            "messages_equal": row["messages"] == row["predicted_messages"],
        }
        for row in rows
    ]


def lightning(world, rounds):
    """What Lightning's loop and ours add to a step of a toy, over a bare loop (mpdemo/labs/lightning_overhead.py)."""
    from mpdemo.labs import lightning_overhead  # an optional package

    result = lightning_overhead.measure(world, 10 * rounds)
    row = {"model": "toy", "bare": result["step_seconds"]["bare loop"], "story": result["story_seconds"]}
    for key, name in (("ours", "our loop"), ("lightning", "Lightning")):
        row |= {key: result["added_seconds"][name], f"{key}_quartiles": result["added_quartiles"][name]}
    return [row]


def main(part, out, rounds):
    """Run one part in this world; rank 0 writes its rows."""
    with join_world() as world:
        parts = {"loop": loop, "ddp": ddp, "pipeline": pipeline, "hybrid": hybrid, "planner": planner}
        parts |= {"memory": memory, "step_times": step_times.measure, "lightning": lightning}
        rows = parts[part](world, int(rounds))
    if world.rank == 0:
        Path(out, f"{part}.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

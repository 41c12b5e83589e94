"""Measure the whole ladder on one model and one batch: gradients against ``single``, speed beside its bound.

``python -m mpdemo demo`` runs this module in as many processes as there are devices to compare (torchrun).
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

from mpdemo import data, models
from mpdemo.cuts import HEADS
from mpdemo.labs.harness import WARMUP, Comparison, join_world
from mpdemo.trial import recorded_steps
from mpdemo.schedules import usual_stages_per_rank
from mpdemo.settings import CUT_RUNGS, RUNG_FORMS, Settings
from mpdemo.timeline import read
from mpdemo.timeline.observe import record_updates
from mpdemo.trial import relative_difference
from mpdemo.world.collectives import gather_objects
from mpdemo.world.cores import shared_cores
from mpdemo.world.launch import end

REFERENCE = "single one-process"
LADDER = ("single", "data_parallel", "ddp", "model_parallel", "pipeline")  # rungs that any world can compare


def rows_of_ladder(processes, sharded=False):
    """Every rung and form that can be compared in a world of so many processes, in the order in which one climbs.

    A hybrid training needs two replicas of two devices; with one process per replica it would need another world.
    With `sharded` the rungs follow that share every layer, where the heads of the transformer divide.
    """
    rows = [(rung, form) for rung in LADDER for form in reversed(RUNG_FORMS[rung])]
    grid = [("hybrid", "per-device")] if processes >= 4 and processes % 2 == 0 else []
    split = [("tensor", "per-device")] if HEADS % processes == 0 else []
    return rows + grid + ([("fsdp", "per-device"), *split] if sharded else [])


def row_settings(base, rung, form, processes) -> Settings:
    """The settings of one row: those of the demo, for this rung and form."""
    scheduled = rung in ("pipeline", "hybrid") and form == "per-device"
    own_cut = rung == base.rung or rung != "hybrid"  # a replica has fewer stages than a pipeline over all devices
    return replace(
        base,
        rung=rung,
        form=form,
        processes=processes if form == "per-device" else None,
        devices=processes if form == "one-process" and rung != "single" else None,
        replicas=(base.replicas or 2) if rung == "hybrid" else None,
        microbatches=base.microbatches if rung in ("pipeline", "hybrid") else None,
        schedule=base.schedule if scheduled else Settings(rung=rung).schedule,
        cut=(base.cut if scheduled else one_stage_per_device(base)) if rung in CUT_RUNGS and own_cut else None,
    )


def one_stage_per_device(base) -> str | None:
    """The cut of rows with one stage per device: of several stages, each `stages_per_rank` become one."""
    per_rank = base.stages_per_rank or usual_stages_per_rank(base.schedule)
    return base.cut and ",".join(base.cut.split(",")[per_rank - 1 :: per_rank])


def measure(base, world, rounds, sharded=False) -> list[dict]:
    """Return a row for each rung and form: images/s, speed-up, bound, gradient difference."""
    return measured_rows(compare(base, world, rows_of_ladder(world.world_size, sharded)), base, rounds)


def compare(base, world, climbed) -> Comparison:
    """The trials of some rungs and forms, ``single`` among them, and those from which their bounds are computed."""
    comparison = Comparison(world, *model_and_batch(base))
    for rung, form in climbed:
        timeline = form == "per-device" and rung in CUT_RUNGS  # the bounds are read from it
        settings = replace(row_settings(base, rung, form, world.world_size), timeline=timeline)
        trial = comparison.add(f"{rung} {form}", settings)
        if timeline:
            record_updates(trial.optimizer, trial.rung.recorder)
    single = row_settings(base, "single", "one-process", 1)
    share = replace(single, batch_size=base.batch_size // world.world_size)
    comparison.add("independent", share, everywhere=True)
    if ("pipeline", "one-process") in climbed:
        comparison.add("single, microbatches", replace(single, microbatches=base.microbatches))
    return comparison


def measured_rows(comparison, base, rounds) -> list[dict]:
    """Measure, and return a row for each rung and form in the comparison."""
    errors = gradient_differences(comparison, comparison.world)
    comparison.run(rounds, title="measuring")
    limits, rows = bounds(comparison, comparison.world), []
    for rung, form in ((rung, form) for rung, forms in RUNG_FORMS.items() for form in reversed(forms)):
        name = f"{rung} {form}"
        if name not in comparison.trials:
            continue
        speedup, *quartiles = comparison.ratio(REFERENCE, name)
        rows.append(
            {
                "rung": rung,
                "form": form,
                "processes": comparison.world.world_size if form == "per-device" else 1,
                "images_per_second": base.batch_size / comparison.median(name),
                "speedup": speedup,
                "speedup_quartiles": quartiles,
                "bound": limits[rung, form],
                "fraction_of_bound": speedup / limits[rung, form],
                "max_relative_gradient_error": errors[name],
            }
        )
    return rows


def model_and_batch(base):
    """The model with its initial weights, and one batch of real images: (B, C, S, S) and (B,)."""
    dataset = data.load(base.dataset, base.data, base.image_size or 28, base.seed)
    samples = [dataset.train[i] for i in range(base.batch_size)]
    images, labels = (torch.stack([torch.as_tensor(x) for x in column]) for column in zip(*samples, strict=True))
    images = dataset.prepare(images)
    shape = {"classes": dataset.classes, "channels": dataset.channels, "image_size": images.shape[-1]}
    return models.build(base.model, norm=base.norm, seed=base.seed, **shape), (images, labels)


def gradient_differences(comparison, world) -> dict:
    """Largest relative difference of every trial's gradients from ``single``, over all ranks, by name."""
    reference = comparison.trials[REFERENCE].gradients() if world.rank == 0 else None
    reference = gather_objects(reference)[0]
    errors = {}
    for name, trial in comparison.trials.items():
        if name != "independent":  # it has another batch
            error = relative_difference(trial.gradients(), reference) if trial else 0.0
            errors[name] = max(gather_objects(error))
    return errors


def bounds(comparison, world) -> dict:
    """Speed-up over ``single`` that each row could reach at best, from what was measured beside it."""
    single, cores = comparison.median(REFERENCE), shared_cores()
    independent = single / comparison.median("independent")
    result = {("single", "one-process"): 1.0}
    result["data_parallel", "one-process"] = independent
    result |= {(rung, "per-device"): independent for rung in ("ddp", "fsdp", "tensor")}  # all share the arithmetic
    for rung in (rung for rung in CUT_RUNGS if f"{rung} per-device" in comparison.trials):
        trial = comparison.trials[f"{rung} per-device"]
        schedule = "naive" if rung == "model_parallel" else trial.settings.schedule
        simulated = [read.predict_seconds(step, schedule, cores) for step in recorded_steps(trial)[WARMUP:]]
        result[rung, "per-device"] = result[rung, "one-process"] = single / statistics.median(simulated)
    if world.device.type == "cpu":  # a CPU operator blocks the one process: its devices never overlap
        result["model_parallel", "one-process"] = 1.0
        if "single, microbatches" in comparison.trials:
            result["pipeline", "one-process"] = single / comparison.median("single, microbatches")
    return result


def main(settings_file, rows_file, rounds, *sharded):
    """Run under torchrun: read the settings, measure, write the rows; "sharded" adds those that shard."""
    base = Settings(**json.loads(Path(settings_file).read_text()))
    with join_world() as world:
        rows = measure(base, world, int(rounds), bool(sharded))
    if world.rank == 0:
        Path(rows_file).write_text(json.dumps(rows))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

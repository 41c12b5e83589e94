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
from mpdemo.labs.harness import WARMUP, Comparison, join_world
from mpdemo.settings import RUNG_FORMS, Settings
from mpdemo.timeline import read
from mpdemo.training.measure import relative_difference
from mpdemo.world.collectives import gather_objects

CUT_RUNGS = ("model_parallel", "pipeline")
REFERENCE = "single one-process"


def rows_of_ladder():
    """Every rung and form, in the order in which one climbs."""
    return [(rung, form) for rung, forms in RUNG_FORMS.items() for form in reversed(forms)]


def row_settings(base, rung, form, processes) -> Settings:
    """The settings of one row: those of the demo, for this rung and form."""
    return replace(
        base,
        rung=rung,
        form=form,
        processes=processes if form == "per-device" else None,
        devices=processes if form == "one-process" and rung != "single" else None,
        microbatches=base.microbatches if rung == "pipeline" else None,
        cut=base.cut if rung in CUT_RUNGS else None,
    )


def measure(base, world, rounds) -> list[dict]:
    """Return a row for each rung and form: images/s, speed-up, bound, gradient difference."""
    comparison = Comparison(world, *model_and_batch(base))
    for rung, form in rows_of_ladder():
        timeline = form == "per-device" and rung in CUT_RUNGS  # the bounds are read from it
        settings = replace(row_settings(base, rung, form, world.world_size), timeline=timeline)
        comparison.add(f"{rung} {form}", settings)
    single = row_settings(base, "single", "one-process", 1)
    share = replace(single, batch_size=base.batch_size // world.world_size)
    comparison.add("independent", share, everywhere=True)
    comparison.add("single, microbatches", replace(single, microbatches=base.microbatches))
    errors = gradient_differences(comparison, world)
    comparison.run(rounds, title="measuring")
    limits, rows = bounds(comparison, world), []
    for rung, form in rows_of_ladder():
        name = f"{rung} {form}"
        speedup, *quartiles = comparison.ratio(REFERENCE, name)
        rows.append(
            {
                "rung": rung,
                "form": form,
                "processes": world.world_size if form == "per-device" else 1,
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
    single = comparison.median(REFERENCE)
    independent = single / comparison.median("independent")
    result = {("single", "one-process"): 1.0}
    result["data_parallel", "one-process"] = result["ddp", "per-device"] = independent
    for rung in CUT_RUNGS:
        trial = comparison.trials[f"{rung} per-device"]
        schedule = "naive" if rung == "model_parallel" else trial.settings.schedule
        simulated = [read.predict([step], schedule).step_time for step in trial.recorded_steps()[WARMUP:]]
        result[rung, "per-device"] = result[rung, "one-process"] = single / statistics.median(simulated)
    if world.device.type == "cpu":  # a CPU operator blocks the one process: its devices never overlap
        result["model_parallel", "one-process"] = 1.0
        result["pipeline", "one-process"] = single / comparison.median("single, microbatches")
    return result


def main(settings_file, rows_file, rounds) -> int:
    """Run under torchrun: read the settings, measure, write the rows."""
    base = Settings(**json.loads(Path(settings_file).read_text()))
    with join_world() as world:
        rows = measure(base, world, int(rounds))
    if world.rank == 0:
        Path(rows_file).write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Rungs of the ladder beside the single device, in one world: speed, the best it could be, and gradients.

Used by ``python -m mpdemo demo`` and ``bench``, and by the notebooks' job ``python -m mpdemo.labs.story``.
"""

import statistics
from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy

from mpdemo import data, models
from mpdemo.compare import Comparison, quartiles
from mpdemo.rules import CUT_RUNGS
from mpdemo.settings import RUNG_FORMS
from mpdemo.timeline import read
from mpdemo.timeline.observe import record_updates, recorded_steps
from mpdemo.trial import is_per_device, relative_difference
from mpdemo.world.collectives import gather_objects, sum_over_ranks, whole
from mpdemo.world.devices import shared_cores

SINGLE, INDEPENDENT, IN_PARTS = "single", "independent", "single, microbatches"  # names of what is compared with


def compare(variants, world, model=None, batch=None) -> Comparison:
    """Return the trials of some variants and of what their limits are measured by; all ranks must call this.

    `variants` are settings by name, "single" among them; the rest is as for `mpdemo.trial.Trial`.
    """
    comparison, single = Comparison(world, model, batch), variants[SINGLE]
    for name, settings in variants.items():
        timeline = settings.rung in CUT_RUNGS and is_per_device(settings)  # its limit is read from it
        trial = comparison.add(name, replace(settings, timeline=timeline))
        if timeline:
            record_updates(trial.updates, trial.recorder)
    comparison.add(INDEPENDENT, replace(single, batch_size=single.batch_size // world.world_size), everywhere=True)
    in_parts = {s.microbatches for s in variants.values() if s.rung == "pipeline" and not is_per_device(s)}
    if in_parts:
        comparison.add(IN_PARTS, replace(single, microbatches=max(in_parts)))
    return comparison


def measured_rows(comparison, variants, errors) -> list[dict]:
    """Return a row for each variant of a comparison that has run; all ranks must call this."""
    rows, single = [], comparison.median(SINGLE)
    for name, settings in variants.items():
        seconds, least = comparison.seconds[name], least_seconds(comparison, name, settings)
        speedup, *spread = comparison.ratio(SINGLE, name)
        bound = single / statistics.median(least)
        shares = quartiles([a / b for a, b in zip(least, seconds, strict=True)])
        rows.append(
            {
                "rung": settings.rung,
                "form": form_of(settings),
                "processes": comparison.world.world_size if is_per_device(settings) else 1,
                "images_per_second": settings.batch_size / comparison.median(name),
                "speedup": speedup,
                "speedup_quartiles": spread,
                "bound": bound,
                "fraction_of_bound": speedup / bound,
                "fraction_quartiles": shares,
                "at_bound": name != SINGLE and max(speedup / bound, shares[1]) >= 1,
                "max_relative_gradient_error": errors.get(name),
            }
        )
    return rows


def least_seconds(comparison, name, settings) -> list[float]:
    """Return the least that a variant's step could take, in each round; all ranks must call this.

    Where the devices share the batch or each layer: as long as processes that do not talk to each other. Where the
    model is cut: as the schedule is simulated, with the operations' times of the same step. A CPU operator blocks the
    one process that drives several devices, so these never overlap: as long as the single device.
    """
    if settings.rung == SINGLE:
        return comparison.seconds[SINGLE]
    if settings.rung not in CUT_RUNGS:
        return comparison.seconds[INDEPENDENT]
    if not is_per_device(settings):
        if comparison.world.device.type == "cpu":
            return comparison.seconds[IN_PARTS if settings.rung == "pipeline" else SINGLE]
        name = next(other for other in comparison.trials if other.startswith(settings.rung) and other != name)
    trial, cores = comparison.trials[name], shared_cores()
    schedule = "GPipe" if settings.rung == "model_parallel" else trial.s.schedule
    timed = recorded_steps(trial)[-len(comparison.seconds[name]) :]  # not the warm-up, nor a step for its gradients
    return [read.predict_seconds(step, schedule, cores) for step in timed]


def gradient_differences(comparison) -> dict:
    """Return the largest relative difference of every variant's gradients from the single device's, by name."""
    trial = comparison.trials[SINGLE]
    reference = gather_objects(trial and trial.gradients())[0]
    errors = {}
    for name, trial in comparison.trials.items():
        if name not in (INDEPENDENT, IN_PARTS):  # these are timed alone
            error = relative_difference(trial.gradients(), reference) if trial else 0.0
            errors[name] = max(gather_objects(error))
    return errors


def model_and_batch(settings):
    """Return the model with its initial weights, and one batch of real images: (B, C, S, S) and (B,)."""
    dataset = data.load(settings.dataset, settings.data, settings.image_size or 28, settings.seed)
    samples = [dataset.train[i] for i in range(settings.batch_size)]
    images, labels = (torch.stack([torch.as_tensor(x) for x in column]) for column in zip(*samples, strict=True))
    images = dataset.prepare(images)
    shape = {"classes": dataset.classes, "channels": dataset.channels, "image_size": images.shape[-1]}
    return models.build(settings.model, norm=settings.norm, seed=settings.seed, **shape), (images, labels)


def form_of(settings) -> str:
    """Return the form of a rung, the default where none is asked for."""
    return settings.form or RUNG_FORMS[settings.rung][0]


def as_variants(rows) -> dict:
    """Return settings by name, as `compare` takes them: "single" first, and each as RUNG or as RUNG FORM."""
    return {SINGLE if s.rung == SINGLE else f"{s.rung} {form_of(s)}": s for s in rows}


def validated(trial, model, dataset, world) -> dict:
    """Return loss and accuracy of the validation images, shared out over the ranks, with a trial's weights."""
    weights = {name: whole(p.detach()) for name, p in trial.held.named_parameters()} if trial else {}
    for part in gather_objects(weights):
        model.load_state_dict(part, strict=False)  # a rank of a cut model has some of them
    images, labels = (tensor.tensor_split(world.world_size)[world.rank] for tensor in dataset.validation.tensors)
    with torch.no_grad():
        outputs = model(images)
    loss, correct = cross_entropy(outputs, labels, reduction="sum"), (outputs.argmax(1) == labels).sum()
    sums = sum_over_ranks(torch.stack([loss.double(), correct.double()])) / len(dataset.validation)
    return dict(zip(("loss", "accuracy"), sums.tolist(), strict=True))

"""Measure the whole ladder on one model and one batch: gradients against ``single``, speed beside its bound.

``python -m mpdemo demo`` runs this module in as many processes as there are devices to compare (torchrun).
"""

import copy
import json
import statistics
import sys
from dataclasses import replace

import torch
from tqdm import tqdm

from mpdemo import data, models, parallel
from mpdemo.labs.contest import Contest, recorded_steps, training_step, use_all_cores
from mpdemo.settings import RUNG_FORMS, Settings, checked
from mpdemo.timeline import read
from mpdemo.training.measure import gather_objects, relative_difference
from mpdemo.world.env import World, claim_cores, process_group, where_am_i


def rows_of_ladder():
    """Every rung and form, in the order in which one climbs."""
    return [(rung, form) for rung, forms in RUNG_FORMS.items() for form in reversed(forms)]


def row_settings(base, rung, form, processes) -> Settings:
    """The settings of one row: those of the demo, for this rung and form."""
    cut_model = rung in ("model_parallel", "pipeline")
    return replace(
        base,
        rung=rung,
        form=form,
        processes=processes if form == "per-device" else None,
        devices=processes if form == "one-process" and rung != "single" else None,
        microbatches=base.microbatches if rung == "pipeline" else None,
        cut=base.cut if cut_model else None,
    )


class Ladder:
    """All rungs built on the same weights and the same batch, in one world."""

    def __init__(self, base, world):
        self.base, self.world = base, world
        found = data.load(base.dataset, base.data, base.image_size or 28, base.seed)
        pairs = [found.train[i] for i in range(base.batch_size)]
        self.images, self.labels = (
            torch.stack([torch.as_tensor(x) for x in column]) for column in zip(*pairs, strict=True)
        )
        self.model = models.build(
            base.model,
            classes=found.classes,
            channels=found.channels,
            image_size=self.images.shape[-1],
            norm=base.norm,
            seed=base.seed,
        )
        self.contest, self.rungs = Contest(world), {}
        reference = parallel.make(self._copy(), self._alone(), checked(row_settings(base, "single", None, 1)))
        reference.step(self.images, self.labels)
        self.reference = {name: p.grad.clone() for name, p in reference.named_parameters().items()}

    def _copy(self):
        return copy.deepcopy(self.model)

    def _alone(self):
        """A world of one: for the forms that a single process drives."""
        return World(device=self.world.device, backend=self.world.backend)

    def add(self, rung_name, form, name=None, **changes) -> float:
        """Build one rung; return its largest relative gradient difference from ``single`` over all ranks."""
        per_device = form == "per-device"
        timeline = per_device and rung_name in ("model_parallel", "pipeline")  # the bounds are read off it
        settings = row_settings(self.base, rung_name, form, self.world.world_size)
        settings = replace(settings, timeline=timeline, **changes)
        settings = checked(settings, self.world.world_size if per_device else None)
        active = per_device or self.world.rank == 0
        error, step, all_cores = 0.0, None, rung_name == "data_parallel"
        pinned = use_all_cores() if all_cores else None
        if active:
            rung = parallel.make(self._copy(), self.world if per_device else self._alone(), settings)
            images, labels = self._share(rung)
            optimizer = torch.optim.SGD(rung.named_parameters().values(), lr=1e-3, momentum=0.9)
            rung.step(images, labels)
            error = relative_difference({n: p.grad for n, p in rung.named_parameters().items()}, self.reference)
            step = training_step(rung, optimizer, images, labels)
            self.rungs[rung_name, form] = rung, settings
        self.contest.add(name or f"{rung_name} {form}", step, alone=not per_device, all_cores=all_cores)
        if pinned:
            claim_cores(self.world)
        return max(gather_objects(error))

    def _share(self, rung):
        """This rank's part of the batch."""
        images = self.images.chunk(rung.replicas)[rung.replica]
        labels = self.labels.chunk(rung.replicas)[rung.replica]
        return (images if rung.has_input else images.new_empty(len(images), 0)), labels

    def add_bounds(self):
        """What the speed-ups are compared with: processes that need not talk, and microbatches without overlap."""
        share = self.base.batch_size // self.world.world_size
        rung = parallel.make(self._copy(), self._alone(), checked(row_settings(self.base, "single", None, 1)))
        optimizer = torch.optim.SGD(rung.named_parameters().values(), lr=1e-3, momentum=0.9)
        step = training_step(rung, optimizer, self.images[:share], self.labels[:share])
        self.contest.add("independent", step)
        self.add("single", "one-process", "single, microbatches", microbatches=self.base.microbatches)

    def bounds(self) -> dict:
        """Speed-up over ``single`` that each row could reach at best, from what was measured beside it."""
        single = self.contest.median("single one-process")
        independent = single / self.contest.median("independent")
        result = {("single", "one-process"): 1.0, ("data_parallel", "one-process"): independent}
        result["ddp", "per-device"] = independent
        for rung_name in ("model_parallel", "pipeline"):
            rung, settings = self.rungs[rung_name, "per-device"]
            name = "naive" if rung_name == "model_parallel" else settings.schedule
            simulated = [read.predict([step], name).step_time for step in recorded_steps(rung)]
            bound = single / statistics.median(simulated)
            result[rung_name, "per-device"] = result[rung_name, "one-process"] = bound
        if self.world.device.type == "cpu":  # a CPU operator blocks the one process: its devices never overlap
            result["model_parallel", "one-process"] = 1.0
            result["pipeline", "one-process"] = single / self.contest.median("single, microbatches")
        return result


def measure(base, world, rounds) -> list[dict]:
    """Return a row for each rung and form: images/s, speed-up, bound, gradient difference."""
    ladder = Ladder(base, world)
    errors = {key: ladder.add(*key) for key in rows_of_ladder()}
    ladder.add_bounds()
    with tqdm(total=rounds, desc="measuring", unit="round", disable=world.rank > 0) as bar:
        ladder.contest.run(rounds, each_round=lambda done: bar.update(done - bar.n))
    bounds, rows = ladder.bounds(), []
    for rung, form in rows_of_ladder():
        speedup, low, high = ladder.contest.ratio("single one-process", f"{rung} {form}")
        rows.append(
            {
                "rung": rung,
                "form": form,
                "processes": world.world_size if form == "per-device" else 1,
                "images_per_second": base.batch_size / ladder.contest.median(f"{rung} {form}"),
                "speedup": speedup,
                "speedup_quartiles": [low, high],
                "bound": bounds[rung, form],
                "fraction_of_bound": speedup / bounds[rung, form],
                "max_relative_gradient_error": errors[rung, form],
            }
        )
    return rows


def main(settings_file, rows_file, rounds) -> int:
    """Run under torchrun: read the settings, measure, write the rows."""
    world = where_am_i()
    claim_cores(world)
    with open(settings_file) as file:
        base = Settings(**json.load(file))
    with process_group(world):
        rows = measure(base, world, int(rounds))
    if world.rank == 0:
        with open(rows_file, "w") as file:
            json.dump(rows, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

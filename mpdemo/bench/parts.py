"""The measurements behind ``python -m mpdemo bench``, run under torchrun; each gives rows for one table."""

import copy
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

from mpdemo import data, models, parallel
from mpdemo.labs.contest import Contest, quartiles, training_step
from mpdemo.parallel.rung import loss_fn
from mpdemo.settings import Settings, checked
from mpdemo.training.loop import Run, build
from mpdemo.world.env import World, claim_cores, process_group, where_am_i


def make(settings, world, channels=3, classes=1000):
    """Return a rung, its share of a random batch and its optimizer."""
    settings = checked(replace(settings), world.world_size if settings.form == "per-device" else None)
    world = world if settings.form == "per-device" else World(device=world.device)
    size = settings.image_size
    model = models.build(settings.model, classes=classes, channels=channels, image_size=size, norm=settings.norm)
    rung = parallel.make(model, world, settings)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(settings.batch_size, channels, size, size, generator=generator).chunk(rung.replicas)
    labels = torch.randint(0, classes, (settings.batch_size,), generator=generator).chunk(rung.replicas)
    images, labels = images[rung.replica], labels[rung.replica]
    images = images if rung.has_input else images.new_empty(len(images), 0)
    optimizer = torch.optim.SGD(rung.named_parameters().values(), lr=1e-4)
    return rung, settings, training_step(rung, optimizer, images, labels)


def ddp(world, rounds):
    """DDP with two processes against two processes that do not talk, and against one."""
    rows = []
    for model, size, batch in (("resnet18", 64, 64), ("resnet50", 128, 32)):
        base = Settings(rung="single", model=model, image_size=size, batch_size=batch)
        contest = Contest(world)
        _, _, step = make(base, world)
        contest.add("single", step, alone=True)
        _, _, step = make(replace(base, batch_size=batch // world.world_size), world)
        contest.add("independent", step)
        _, _, step = make(replace(base, rung="ddp", form="per-device"), world)
        contest.add("ddp", step)
        contest.run(rounds)
        bound, share = contest.ratio("single", "independent"), contest.ratio("independent", "ddp")
        speedup = contest.ratio("single", "ddp")
        rows.append(
            {
                "model": model,
                "image_size": size,
                "batch": batch,
                "processes": world.world_size,
                "speedup": speedup[0],
                "speedup_quartiles": list(speedup[1:]),
                "bound": bound[0],
                "fraction_of_bound": share[0],
                "fraction_quartiles": list(share[1:]),
            }
        )
    return rows


def loop(world, rounds):
    """The training loop against ten bare lines doing the same work on the same batches, epoch by epoch in turn.

    What the loop adds to a step does not depend on the model, so it is read off a toy, whose steps are short; on the
    ConvNet it is smaller than the noise.
    """
    rows = [loop_row(world, "toy", 20 * rounds), loop_row(world, "convnet", 4 * rounds)]
    added = rows[0]["added_seconds"]  # a step
    return [row | {"added_share": added / (row["bare_seconds"] / row["steps"])} for row in rows]


def loop_row(world, model, epochs):
    """Measure one model: seconds an epoch with and without the loop, and what the loop adds to a step."""
    folder = tempfile.mkdtemp(prefix="mpdemo-bench-")
    settings = checked(Settings(rung="single", model=model, norm="group", epochs=10_000, out=folder))
    found, rung, optimizer, scheduler = build(settings, world)
    loaders = data.Loaders(found, settings.batch_size)
    run = Run(settings, world, rung, optimizer, scheduler, loaders)
    run.validate = lambda: (0.0, 0.0)  # the bare loop does not validate
    run.start_bar(disable=True)
    bare_model = copy.deepcopy(rung.model)
    bare_optimizer = torch.optim.SGD(bare_model.parameters(), lr=settings.lr, momentum=0.9)
    bare_loaders = data.Loaders(found, settings.batch_size)

    def bare(epoch):
        bare_loaders.sampler.set_epoch(epoch)
        for images, labels in bare_loaders.train:
            bare_optimizer.zero_grad()
            loss = loss_fn(bare_model(images), labels)
            loss.backward()
            bare_optimizer.step()

    seconds, steps = {"bare": [], "loop": []}, loaders.steps_per_epoch
    for number in range(-2, epochs):
        works = [("bare", lambda n=number: bare(n + 2)), ("loop", run.one_epoch)]
        for name, work in works if number % 2 else reversed(works):  # neither is always the first
            begin = time.perf_counter()
            with redirect_stdout(None):  # the loop's line an epoch
                work()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    shutil.rmtree(folder)
    pairs = list(zip(seconds["loop"], seconds["bare"], strict=True))
    return {
        "model": model,
        "steps": steps,
        "bare_seconds": statistics.median(seconds["bare"]),
        "loop_seconds": statistics.median(seconds["loop"]),
        "loop_over_bare": statistics.median(a / b for a, b in pairs),
        "quartiles": quartiles([a / b for a, b in pairs]),
        "added_seconds": statistics.median((a - b) / steps for a, b in pairs),
        "added_quartiles": quartiles([(a - b) / steps for a, b in pairs]),
    }


def main(part, out, rounds) -> int:
    """Run one part in this world; rank 0 writes its rows."""
    world = where_am_i()
    claim_cores(world)
    from mpdemo.bench.pipelines import pipeline
    from mpdemo.bench.planner import planner

    with process_group(world):
        rows = {"ddp": ddp, "pipeline": pipeline, "planner": planner, "loop": loop}[part](world, int(rounds))
    if world.rank == 0:
        Path(out, f"{part}.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Measure a few steps of some training runs on the devices of this machine.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.plan.measure FOLDER

It reads ``question.json`` in the folder, and rank 0 writes ``summary.json`` there. ``python -m mpdemo plan --cost
measure`` starts it (advice.py).
"""

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from mpdemo.errors import UserError, error_line
from mpdemo.models.own import OwnModel
from mpdemo.rules import CUT_RUNGS
from mpdemo.run import Run, builder
from mpdemo.settings import Settings, checked
from mpdemo.trial import STEADY, build_model, is_per_device, join_world, place_of, random_batch, share_of
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects, rest
from mpdemo.world.launch import end, report

STEPS, WARMUP = 7, 2  # timed steps of a rung, and untimed ones before them


def timed(world, settings, model, batch) -> float:
    """Do a few steps of complete settings; return the median seconds. All ranks must call this."""
    if not is_per_device(settings) and world.rank > 0:
        for _ in range(2 * (WARMUP + STEPS)):
            rest()
        return gather_objects(None)[0]
    run, seconds = Run(replace(settings, lr=STEADY), place_of(settings, world), lambda: model), []
    rung = builder(settings.rung)(run)
    images, labels = share_of(batch, rung, run.device)
    for _ in range(WARMUP + STEPS):  # all ranks begin each together, and wait for its end
        rest()
        begin = clock.now(run.device)
        rung.step(images, labels)
        for device in run.devices:
            clock.wait(device)
        rest()
        seconds.append(clock.now(run.device) - begin)
    return gather_objects(median(seconds[WARMUP:]))[0]


def step_seconds(world, settings, classes, channels) -> float:
    """Run a few steps of a training run on random images; return the median seconds. All ranks must call this."""
    s = checked(settings, world.world_size if is_per_device(settings) else None)
    return timed(world, s, build_model(s, classes, channels), random_batch(s, classes, channels))


def step_seconds_of_own(world, s, own) -> float:
    """Do the same with a reader's own model, on random samples in the shape of its inputs."""
    cut = s.rung in CUT_RUNGS
    try:
        model = own.with_values(s.batch_size // (s.replicas or 1) // s.microbatches if cut else None, world.device)
        samples, labels = own.samples(s.batch_size), torch.zeros(s.batch_size, dtype=torch.long)
        samples = torch.randn_like(samples) if samples.is_floating_point() else samples
        return timed(world, s, model, (samples, labels))
    except (Exception, SystemExit) as error:  # the reader's own code
        raise UserError(f"--model {own.name} does not compute with --rung {s.rung} ({error_line(error)})") from None


def main(folder):
    """Read a folder's question in every process; rank 0 writes the seconds of each run, until the budget ends."""
    question = SimpleNamespace(**json.loads(Path(folder, "question.json").read_text()))
    began, seconds = time.monotonic(), []
    own = OwnModel.wanted(question) if ":" in question.model else None
    with join_world() as world:
        for settings in (Settings(**words) for words in question.settings):
            if gather_objects(time.monotonic() - began)[0] > question.budget:
                seconds.append(None)
            elif own:
                seconds.append(step_seconds_of_own(world, settings, own))
            else:
                seconds.append(step_seconds(world, settings, question.classes, question.channels))
            gc.collect()
    if world.rank == 0:
        Path(folder, "summary.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as error:
        report(error, None)
        end(error.status if isinstance(error, UserError) else 1)
    end()

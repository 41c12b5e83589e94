"""Measure what a step consists of, in seconds: a step with few images, and each block with few and with many.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.speeds FOLDER

`mpdemo.plan.step_time` puts a step together from these; `mpdemo.labs.step_times` compares the sums with real steps. As
a program it predicts the steps of ``question.json`` in the folder: ``python -m mpdemo plan --cost measure`` starts it.
"""

import copy
import gc
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from mpdemo.labs.harness import Comparison, rest
from mpdemo.labs.machine import answer_question, message
from mpdemo.trial import Trial, build_model, random_batch
from mpdemo.plan import cost
from mpdemo.plan.footprint import footprints
from mpdemo.plan.step_time import Speeds, few_images, images_at_once, seconds, where
from mpdemo.schedules import SCHEDULES
from mpdemo.settings import CUT_RUNGS, Settings, checked
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

ROUNDS = 3  # in which the parts of one training are timed for the plan


class Parts:
    """What the steps of some trainings consist of: built once, and timed in turn as often as one likes.

    Parameters
    ----------
    world : World
    model, batch
        As for `mpdemo.labs.trial.Trial`.
    settings : list of Settings
        Checked. All ranks must build this: some trainings exchange messages when they are built.
    """

    def __init__(self, world, model, batch, settings):
        self.world, self.images = world, batch[0].to(world.device)
        self.blocks = {}  # where they run -> the blocks one by one, the numbers of images, whether halves are wanted
        for place in dict.fromkeys(map(where, settings)):
            like = [s for s in settings if where(s) == place]
            here = copy.deepcopy(model).to(world.device)
            if "split" in place:
                here = Trial(replace(like[0], activation_checkpointing=False), world, model, batch).rung.model
            halves = any(s.rung in CUT_RUNGS and SCHEDULES[s.schedule].splits_backward for s in like)
            sizes = sorted({images_at_once(s) for each in like for s in (each, few_images(each))})
            self.blocks[place] = [here.stage(i, i + 1) for i in range(len(here))], sizes, halves
        self.steps = Comparison(world, model, batch)
        for few in dict.fromkeys(map(few_images, settings)):
            self.steps.add(few, few)

    def measure(self, rounds) -> Speeds:
        """Time all parts in turn, `rounds` times; return the medians, as rank 0 sees them. All ranks must call this."""
        costs = {}
        for _ in range(rounds):
            for place, (parts, sizes, halves) in self.blocks.items():
                for size in sizes:
                    costs.setdefault((place, size), []).append(self.slowest(place, parts, size, halves))
        _, per_byte = message(self.world)
        self.steps.seconds.clear()
        self.steps.run(rounds, warmup=0, again=True)
        speeds = Speeds(
            blocks={key: cost.medians(runs) for key, runs in costs.items()},
            few={few: self.steps.median(few) for few in self.steps.trials},
            per_byte=per_byte,
        )
        return gather_objects(speeds)[0]

    def slowest(self, place, parts, size, halves) -> list:
        """Return the cost of each block on the slowest rank, for which the others would wait."""
        active, measured = place != "alone" or self.world.rank == 0, None
        rest()
        if active:
            measured = cost.once(parts, self.images[:size], partial(clock.now, self.world.device), halves)
            for parameter in (p for part in parts for p in part.parameters()):
                parameter.grad = None
        ranks = [costs for costs in gather_objects(measured) if costs]
        return max(ranks, key=cost.total)


def answer(world, question) -> dict:
    """Return the ``seconds`` of the steps that are asked for, one after the other, until the budget is spent."""
    q, began, result = SimpleNamespace(**question), time.monotonic(), []
    for words in q.settings:
        spent = gather_objects(time.monotonic() - began)[0] > q.budget
        result.append(None if spent else predicted(world, Settings(**words), q.classes, q.channels))
        gc.collect()  # a training holds itself in a circle; its memory is for the next one
    return {"seconds": result}


def predicted(world, settings, classes, channels) -> float:
    """Return the seconds of a step, predicted from what is measured now."""
    s = checked(settings, world.world_size if settings.rung != "single" else None)
    facts = {"classes": classes, "channels": channels}
    model, batch = build_model(s, **facts), random_batch(s, **facts)
    speeds = Parts(world, model, batch, [s]).measure(ROUNDS)
    return seconds(s, footprints(s.model, s.image_size, norm=s.norm, **facts), speeds)


if __name__ == "__main__":
    end(answer_question(sys.argv[1], answer))

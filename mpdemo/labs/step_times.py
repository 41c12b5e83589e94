"""Are step times right that were predicted beforehand? The parts of a step are measured first, then whole steps.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.step_times runs/step_times
    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.step_times runs/step_times 1 ddp pipeline     once, of two

A machine's speed changes while it is measured: other users share its memory, its caches and its power. So this is done
many times over: measure the parts, predict, and only then do the steps. Every process takes part; rank 0 writes
``summary.json`` in the folder. Also a part of ``python -m mpdemo bench``. Taught in notebooks/11_which_one.ipynb.
"""

import sys
from dataclasses import replace
from statistics import median

from mpdemo.labs.harness import WARMUP, Comparison, write_result
from mpdemo.labs.ladder import model_and_batch
from mpdemo.labs.speeds import Parts
from mpdemo.notebook.story import story
from mpdemo.plan import predict
from mpdemo.plan.case import Case
from mpdemo.plan.choose import choose
from mpdemo.plan.step_time import seconds
from mpdemo.settings import Settings, as_arguments, checked
from mpdemo.world.launch import end

HALVES = {"cut": None, "microbatches": 4}  # one stage per device
CASES = [  # changes of the story's settings
    {"rung": "single"},
    {"rung": "single", "accumulate": 4},
    {"rung": "ddp"},
    {"rung": "ddp", "accumulate": 2},
    {"rung": "ddp", "activation_checkpointing": True},
    {"rung": "model_parallel"},
    {"rung": "pipeline", "schedule": "gpipe", **HALVES},
    {"rung": "pipeline", "schedule": "1f1b", **HALVES},
    {"rung": "pipeline", "schedule": "1f1b", **HALVES, "microbatches": 8},
    {"rung": "pipeline"},
    {"rung": "pipeline", "schedule": "zbv"},
    {"rung": "fsdp"},
    {"rung": "fsdp", "reshard": "never"},
    {"rung": "fsdp", "accumulate": 2},
    {"rung": "tensor"},
    {"rung": "tensor", "sequence_parallel": True},
]


REPEATS = 3  # of every part before a prediction, and of every step after it


def measure(world, rounds, cases=CASES, repeats=REPEATS) -> list[dict]:
    """Return a row for each case, complete on rank 0. All ranks must call this.

    In each round the parts are measured, all steps are predicted, and then they are done, in turn.

    Returns
    -------
    list of dict
        ``case``, as one types it; ``predicted`` and ``measured`` (seconds of a step), the medians of the rounds;
        ``ratios`` (of the two, in each round), their median ``ratio``; and ``recommended``: whether the plan
        recommends this case. The plan asks first what fits, and not what is fastest.
    """
    wanted = [replace(Settings(**story(**changes)), timeline=False) for changes in cases]
    settings = [checked(s, world.world_size if s.rung != "single" else None) for s in wanted]
    model, batch = model_and_batch(settings[0])
    blocks, parts = predict.blocks_of(settings[0]), Parts(world, model, batch, settings)
    comparison = Comparison(world, model, batch)
    for number, case in enumerate(wanted):
        comparison.add(number, case)
    comparison.run(0, WARMUP)
    predicted, measured = [[] for _ in cases], [[] for _ in cases]
    for _ in range(rounds):
        speeds = parts.measure(repeats)
        comparison.seconds.clear()
        comparison.run(repeats, warmup=0, again=True)
        for number, s in enumerate(settings):
            predicted[number].append(seconds(s, blocks, speeds))
            measured[number].append(comparison.median(number))
    best = recommended(settings[0], world.world_size)
    return [
        {"case": " ".join(as_arguments(changes)), "recommended": changes == best} | row_of(predictions, steps)
        for changes, predictions, steps in zip(cases, predicted, measured, strict=True)
    ]


def row_of(predicted, measured) -> dict:
    """Return what the rounds of one case say: medians, and how far apart the two are in each round."""
    ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
    return {"predicted": median(predicted), "measured": median(measured), "ratio": median(ratios), "ratios": ratios}


def recommended(settings, devices) -> dict:
    """Return the settings that `mpdemo.plan.choose` recommends for the story on so many devices, as in `CASES`."""
    data = {"image_size": settings.image_size, "classes": 10, "channels": 1}
    choice = choose(Case(settings.model, settings.batch_size, devices, optimizer=settings.optimizer, **data))
    return {name: value for name, value in choice.settings.items() if name not in ("batch_size", "processes")}


def main(out, rounds=9, *rungs):
    """Measure in every process all cases, or those rungs as the story has them; rank 0 writes the result."""
    cases = [{"rung": rung} for rung in rungs] or CASES
    write_result(out, lambda world: {"rows": measure(world, int(rounds), cases), "device": world.device.type})


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

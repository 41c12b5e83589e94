"""Are step times right that ``plan --cost measure`` says? A few steps of each rung alone, then all rungs alternately.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.step_times runs/step_times
    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.step_times runs/step_times 1 ddp pipeline     once, of two

A machine's speed changes while it is measured: other users share its memory, its caches and its power. So this is done
many times over: the plan's few steps, and only then those that it is compared with. Every process takes part; rank 0
writes ``summary.json`` in the folder. Taught in notebooks/11_which_one.ipynb.
"""

import sys
from dataclasses import replace
from statistics import median

from mpdemo.compare import Comparison, model_and_batch, write_result
from mpdemo.notebook.recipe import recipe
from mpdemo.plan.measure import step_seconds
from mpdemo.settings import Settings, as_arguments
from mpdemo.world.launch import end

HALVES = {"cut": None, "microbatches": 4}  # one stage per device
CASES = [  # changes of the course model's settings
    {"rung": "single"},
    {"rung": "single", "microbatches": 4},
    {"rung": "ddp"},
    {"rung": "ddp", "microbatches": 2},
    {"rung": "ddp", "activation_checkpointing": True},
    {"rung": "model_parallel"},
    {"rung": "pipeline", "schedule": "GPipe", **HALVES},
    {"rung": "pipeline", "schedule": "1F1B", **HALVES},
    {"rung": "pipeline"},
    {"rung": "pipeline", "schedule": "ZBVZeroBubble"},
    {"rung": "fsdp"},
    {"rung": "fsdp", "reshard": "never"},
    {"rung": "tensor"},
    {"rung": "tensor", "sequence_parallel": True},
]
REPEATS = 3  # of every step that a prediction is compared with


def measure(world, rounds, cases=CASES, repeats=REPEATS) -> list[dict]:
    """Return a row for each case, complete on rank 0. All ranks must call this.

    Returns
    -------
    list of dict
        ``case``, as one types it; ``predicted`` and ``measured`` (seconds of a step), the medians of the rounds;
        ``ratios`` (of the two, in each round) and their median ``ratio``.
    """
    wanted = [replace(Settings(**recipe(**changes)), timeline=False) for changes in cases]
    comparison = Comparison(world, *model_and_batch(wanted[0]))
    for number, settings in enumerate(wanted):
        comparison.add(number, settings)
    predicted, measured = [[] for _ in cases], [[] for _ in cases]
    for _ in range(rounds):
        for number, settings in enumerate(wanted):
            predicted[number].append(step_seconds(world, settings, classes=10, channels=1))
        comparison.seconds.clear()
        comparison.run(repeats, again=True)
        for number in range(len(cases)):
            measured[number].append(comparison.median(number))
    return [
        {"case": " ".join(as_arguments(changes))} | row_of(predictions, steps)
        for changes, predictions, steps in zip(cases, predicted, measured, strict=True)
    ]


def row_of(predicted, measured) -> dict:
    """Return what the rounds of one case say: medians, and how far apart the two are in each round."""
    ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
    return {"predicted": median(predicted), "measured": median(measured), "ratio": median(ratios), "ratios": ratios}


def main(out, rounds=9, *rungs):
    """Measure in every process all cases, or those rungs with the course model's settings; rank 0 writes the result."""
    cases = [{"rung": rung} for rung in rungs] or CASES
    write_result(out, lambda world: {"rows": measure(world, int(rounds), cases), "device": world.device.type})


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

"""Are step times right that ``plan --cost measure`` says? A few steps of each rung alone, then all rungs alternately.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.step_times runs/step_times

A machine's speed changes while it is measured: other users share its memory, its caches and its power. So this is done
many times over: the plan's few steps, and only then those that it is compared with. Every process takes part; rank 0
writes ``summary.json`` in the folder. A part of `make bench`.
"""

import sys
from statistics import median

from mpdemo.compare import Comparison, model_and_batch, write_result
from mpdemo.labs import predictions
from mpdemo.notebook.recipe import recipe
from mpdemo.paired import ROUNDS, ratio, to_row
from mpdemo.plan.measure import step_seconds
from mpdemo.settings import Settings, as_arguments
from mpdemo.world.launch import end

OF_COURSE_MODEL = [case for case in predictions.CASES[2] if not {"model", "precision"} & set(case)]
CASES = [{"rung": "single"}, {"rung": "single", "microbatches": 4}, *OF_COURSE_MODEL]
REPEATS = 3  # of every step with which a prediction is compared, in each round


def measure(world) -> dict:
    """Return a row for each case, complete on rank 0; all ranks must call this.

    ``case``, as one types it; ``predicted`` and ``measured`` (seconds of a step), the medians of the rounds; ``ratio``
    and ``ratio_interval``, paired.
    """
    wanted = [Settings(**recipe(**case, timeline=False)) for case in CASES]
    comparison = Comparison(world, *model_and_batch(wanted[0]))
    for number, settings in enumerate(wanted):
        comparison.add(number, settings)
    predicted, measured = [[] for _ in CASES], [[] for _ in CASES]
    for _ in range(ROUNDS):
        for number, settings in enumerate(wanted):
            predicted[number].append(step_seconds(world, settings, classes=10, channels=1))
        comparison.seconds.clear()
        comparison.run(REPEATS, again=True)
        for number in range(len(CASES)):
            measured[number].append(comparison.median(number))
    rows = []
    for case, plan, steps in zip(CASES, predicted, measured, strict=True):
        row = {"case": " ".join(as_arguments(case)), "predicted": median(plan), "measured": median(steps)}
        rows.append(row | to_row("ratio", ratio(plan, steps)))
    return {"rows": rows}


if __name__ == "__main__":
    end(write_result(sys.argv[1], measure))

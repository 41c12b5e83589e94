"""The pictures of notebooks/05_pipeline.ipynb and 06_hybrid.ipynb: schedules, simulated and recorded."""

from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.labs.pipeline_explorer import explore, pipeline
from mpdemo.notebook.ladder import loss_over_single as losses
from mpdemo.notebook.plots import curves, timelines
from mpdemo.plan.simulate import simulate as simulated
from mpdemo.plan.simulate import simulate_order
from mpdemo.timeline import read

__all__ = ["curves", "explore", "losses", "order", "recorded", "schedule", "timelines", "typical"]


def schedule(name, ranks, microbatches, forward=1, stages_per_rank=1):
    """Simulate a schedule: a microbatch takes `forward` on a rank, and twice as long on its way back."""
    if stages_per_rank > 1:
        return pipeline(ranks, microbatches, stages_per_rank, name, ratio=2.0)
    return simulated(name, [forward] * ranks, [2 * forward] * ranks, microbatches, ranks)


def order(operations):
    """Draw an order of your own (one list of operations per stage) above 1F1B, or say why it never ends."""
    stages, microbatches = len(operations), len(operations[0]) // 2
    try:
        yours = simulate_order(operations, forward=1, backward=2)
    except UserError as error:
        return print(error)
    return timelines({"yours": yours, "1F1B": schedule("1F1B", stages, microbatches)})


def typical(folder, *names):
    """Draw the recorded step of median length of some variants of the lab, with the memory of each."""
    steps = {name: read.typical(read.load(Path(folder, name))[1:]) for name in names}
    return timelines({f"{name}, measured": step for name, step in steps.items()}, unit="s")


def typical_step(folder):
    """Return the step of median length of a run, without its first two."""
    return read.typical(read.load(folder)[2:])


def recorded(folder):
    """Draw the step of median length of a run, a rank's second stage in a paler colour."""
    step = typical_step(folder)
    ranks = 1 + max(row["rank"] for row in step)
    stages = {rank: sorted({row["stage"] for row in step if row["rank"] == rank}) for rank in range(ranks)}
    rows = [row | {"stage": row["rank"] + ranks * stages[row["rank"]].index(row["stage"])} for row in step]
    return timelines({"measured (paler: a rank's second stage)": rows}, memory=False, unit="s")

"""The pictures of notebooks/04_model_parallel.ipynb and 05_pipeline.ipynb: schedules, simulated and recorded."""

from mpdemo.errors import UserError
from mpdemo.labs.pipeline_explorer import explore, pipeline
from mpdemo.notebook.plots import curves, timelines
from mpdemo.plan.simulate import simulate as simulated
from mpdemo.plan.simulate import simulate_order

__all__ = ["curves", "explore", "order", "schedule", "timelines"]


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

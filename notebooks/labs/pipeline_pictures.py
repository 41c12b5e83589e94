"""The pictures of notebooks/04_model_parallel.ipynb and 05_pipeline.ipynb: schedules, simulated and recorded.

The unit of time is the forward pass of one microbatch on one rank, however many stages that rank's part of the model is
cut into; so all schedules do the same work.
"""

from mpdemo.errors import UserError
from mpdemo.notebook.plots import curves, timelines
from mpdemo.notebook.plots.timeline import in_milliseconds
from mpdemo.predict import planner, simulate, usual_stages_per_rank
from mpdemo.predict.footprint import ModelSpec
from mpdemo.predict.simulate import simulate_order
from mpdemo.settings.cuts import block_names, resolve_cut
from mpdemo.world.gpus import GPUS

__all__ = ["best_split", "curves", "order", "schedule", "timelines"]


def schedule(name, ranks, microbatches):
    """Simulate a schedule: a backward pass takes twice as long as a forward pass, and its halves equally long."""
    per_rank = usual_stages_per_rank(name)
    forward = [1 / per_rank] * ranks * per_rank
    return simulate(name, forward, [2 * time for time in forward], microbatches, ranks, weight=0.5)


def order(operations):
    """Draw an order of your own (one list of operations per stage) above GPipe, or say why it never ends."""
    try:
        yours = simulate_order(operations, forward=1, backward=2)
    except UserError as error:
        return print(error)
    return timelines({"yours": yours, "GPipe": schedule("GPipe", len(operations), len(operations[0]) // 2)})


def best_split(model, usual, gpu, batch, microbatches):
    """Draw a step of 1F1B on two GPUs, split after the block `usual` and where the planner would; print their costs."""
    request = planner.SplitRequest(ModelSpec(model), batch, 2, gpu, GPUS[gpu].memory, "momentum")
    names, panels = block_names(model), {}
    given = planner.evaluate(request, "1F1B", microbatches, resolve_cut(names, usual, 2))
    for found in (given, planner.best_split(request, "1F1B", microbatches)):
        panels[title := f"split before {names[found.points[0]]}"] = in_milliseconds(found.simulation.events)
        peaks = " and ".join(f"{peak / 2**30:.1f} GiB" for peak in found.peaks)
        print(f"{title}: a planned step of {found.step_time / given.step_time:.2f}, peak memory {peaks}")
    return timelines(panels, unit="ms by the data sheet")

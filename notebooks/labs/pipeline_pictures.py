"""The pictures of notebooks/04_model_parallel.ipynb and 05_pipeline.ipynb: schedules, simulated and recorded."""

from mpdemo.errors import UserError
from mpdemo.labs.pipeline_explorer import explore, pipeline
from mpdemo.notebook.plots import curves, timelines
from mpdemo.plan import planner
from mpdemo.plan.request import PlanRequest
from mpdemo.plan.simulate import simulate as simulated
from mpdemo.plan.simulate import simulate_order
from mpdemo.settings.cuts import block_names, resolve_cut
from mpdemo.world.gpus import GPUS

__all__ = ["best_split", "curves", "explore", "order", "schedule", "timelines"]


def schedule(name, ranks, microbatches, forward=1, stages_per_rank=1):
    """Simulate a schedule: a microbatch takes `forward` on a rank, and twice as long on its way back."""
    if stages_per_rank > 1:
        return pipeline(ranks, microbatches, stages_per_rank, name, ratio=2.0)
    return simulated(name, [forward] * ranks, [2 * forward] * ranks, microbatches, ranks)


def order(operations):
    """Draw an order of your own (one list of operations per stage) above GPipe, or say why it never ends."""
    try:
        yours = simulate_order(operations, forward=1, backward=2)
    except UserError as error:
        return print(error)
    return timelines({"yours": yours, "GPipe": schedule("GPipe", len(operations), len(operations[0]) // 2)})


def best_split(model, usual, gpu, batch, microbatches):
    """Draw a step of 1F1B on two GPUs, split after the block `usual` and where the planner would; print their costs."""
    request = PlanRequest(model, batch, devices=2, gpu=gpu, memory=GPUS[gpu].memory, optimizer="momentum")
    names, panels = block_names(model), {}
    given = planner.evaluate(request, "1F1B", microbatches, resolve_cut(names, usual, 2))
    for found in (given, planner.best_split(request, "1F1B", microbatches)):
        panels[title := f"split before {names[found.points[0]]}"] = found.simulation
        peaks = " and ".join(f"{peak / 2**30:.1f} GiB" for peak in found.peaks)
        print(f"{title}: {1e3 * found.step_time:.0f} ms a step, peak memory {peaks}")
    return timelines(panels, unit="s")

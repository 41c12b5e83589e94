"""The pictures of notebooks/04_model_parallel.ipynb and 05_pipeline.ipynb: schedules, simulated and recorded.

`explore` has a pipeline on sliders: every change draws its simulated timeline. The unit of time is the forward pass of
one microbatch on one rank, however many stages that rank's part of the model is cut into; so all schedules do the same
work. The stages of a rank count for the interleaved schedules only; `ratio` is the time of a backward pass over that of
a forward pass.
"""

from contextlib import suppress

import ipywidgets as w
from IPython.display import display

from mpdemo.errors import UserError
from mpdemo.front_end import has_front_end
from mpdemo.notebook.plots import curves, timelines
from mpdemo.notebook.plots.timeline import in_milliseconds
from mpdemo.predict import SCHEDULES, bubble, planner, simulate, usual_stages_per_rank
from mpdemo.predict.footprint import ModelSpec
from mpdemo.predict.simulate import simulate_order
from mpdemo.settings.cuts import block_names, resolve_cut
from mpdemo.world.gpus import GPUS

__all__ = ["best_split", "curves", "explore", "order", "schedule", "timelines"]
UNIT = "forward passes"  # of one microbatch through one rank's part of the model
WIDGET = "application/vnd.jupyter.widget-view+json"


def schedule(name, ranks, microbatches, forward=1, stages_per_rank=1):
    """Simulate a schedule: a microbatch takes `forward` on a rank, and twice as long on its way back."""
    if stages_per_rank > 1:
        return pipeline(ranks, microbatches, stages_per_rank, name, ratio=2.0)
    return simulate(name, [forward] * ranks, [2 * forward] * ranks, microbatches, ranks)


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
    return timelines(panels, unit="ms, estimated")


def explore(ranks=4, microbatches=8, stages_per_rank=2, schedule="1F1B", ratio=2.0):
    """Show the timeline of a pipeline, with sliders for everything that shapes it in JupyterLab."""
    picture = drawn(schedule, ranks, microbatches, stages_per_rank, ratio)
    if has_front_end():
        controls = {
            "schedule": w.Dropdown(options=list(SCHEDULES), value=schedule, description="schedule"),
            "ranks": w.IntSlider(ranks, 1, 16, description="ranks (P)"),
            "microbatches": w.IntSlider(microbatches, 1, 64, description="microbatches (M)"),
            "stages_per_rank": w.IntSlider(stages_per_rank, 2, 4, description="stages per rank (v)"),
            "ratio": w.FloatSlider(ratio, min=0.5, max=4, step=0.25, description="backward/forward"),
        }
        for control in controls.values():
            control.layout.width, control.style.description_width = "400px", "130px"
            control.continuous_update = False  # one drawing when the slider is released
        output = w.interactive_output(redraw, controls)
        picture.box = w.VBox([*controls.values(), output])  # an attribute, so that it lives as long as the output
        picture.data[WIDGET] = picture.box._repr_mimebundle_()[WIDGET]
    return picture


def redraw(**setting):
    """Display one setting: its line of numbers, and its picture."""
    picture = drawn(**setting)
    print(picture)
    display(picture)


def drawn(schedule, ranks, microbatches, stages_per_rank, ratio):
    """Return the picture of one setting, with its numbers as one line."""
    simulation = pipeline(ranks, microbatches, stages_per_rank, schedule, ratio)
    per_rank, idle, closed_form = simulation.stages_per_rank, simulation.idle_share, "no closed form"
    with suppress(UserError):
        closed_form = f"closed form {bubble.idle_share(simulation.schedule, ranks, microbatches, per_rank):.1%}"
    picture = timelines({"simulated": simulation}, unit=UNIT)
    picture.data["text/plain"] = (
        f"{schedule}: step {simulation.step_time:.4g} {UNIT}, idle {idle:.1%}, {closed_form}, "
        f"{ranks * (1 - idle):.3g} times one device, "
        f"at most {max(simulation.peak_activations) / per_rank:.3g} microbatches' activations on a rank"
    )
    return picture


def pipeline(ranks, microbatches, stages_per_rank, schedule, ratio):
    """Return the simulation of one setting of the sliders; a `UserError` where the schedule cannot run with it."""
    if not schedule.startswith("Interleaved"):
        stages_per_rank = usual_stages_per_rank(schedule)
    forward = [1 / stages_per_rank] * ranks * stages_per_rank
    return simulate(schedule, forward, [ratio * time for time in forward], microbatches, ranks, weight=0.5)

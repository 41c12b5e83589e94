"""A pipeline on sliders, for notebooks/05_pipeline.ipynb: every change draws its simulated timeline.

The unit of time is the forward pass of one microbatch on one rank, however many stages that rank's part of the model is
cut into; so all schedules do the same work. The stages of a rank count for the interleaved schedules only; `ratio` is
the time of a backward pass over that of a forward pass.
"""

from contextlib import suppress

import ipywidgets as w
from IPython.display import display

from mpdemo.errors import UserError
from mpdemo.front_end import has_front_end
from mpdemo.notebook.plots import timelines
from mpdemo.plan import SCHEDULES, bubble, simulate, usual_stages_per_rank

UNIT = "forward passes"  # of one microbatch through one rank's part of the model
WIDGET = "application/vnd.jupyter.widget-view+json"


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

"""A pipeline on sliders: every change draws its simulated timeline. Used in notebooks/05_pipeline.ipynb."""

import base64

import ipywidgets as w

from mpdemo.errors import UserError
from mpdemo.notebook.bundle import Bundle
from mpdemo.notebook.live_view import has_front_end
from mpdemo.notebook.plots import timeline
from mpdemo.plan import SCHEDULES, bubble, simulate, usual_stages_per_rank

UNIT = "forward passes"  # of one microbatch through one rank's part of the model
WIDGET = "application/vnd.jupyter.widget-view+json"


def explore(ranks=4, microbatches=8, stages_per_rank=2, schedule="1f1b", ratio=2.0, *, live=None) -> Bundle:
    """Show a pipeline with sliders for everything that shapes its timeline.

    The unit of time is the forward pass of one microbatch on one rank, however many stages that rank's part of the
    model is cut into; so all schedules do the same work.

    Parameters
    ----------
    ranks, microbatches, stages_per_rank : int
        P, M and v at the start; v counts for the interleaved schedules only.
    schedule : str
        A name in ``mpdemo.plan.SCHEDULES``.
    ratio : float
        Time of a backward pass over that of a forward pass.
    live : bool, optional
        Whether to show the sliders; by default where there is a front end.

    Returns
    -------
    Bundle
        The picture and one line of text; with a front end, the widget too.
    """
    setting = {"schedule": schedule, "ranks": ranks, "microbatches": microbatches}
    setting |= {"stages_per_rank": stages_per_rank, "ratio": ratio}
    simulation = pipeline(**setting)
    picture = timeline(ideal=simulation, unit=UNIT)
    picture.data["text/plain"] = f"{schedule}: {describe(simulation)}"
    if has_front_end() if live is None else live:
        picture.box = sliders(**setting)  # an attribute, so that the widget lives as long as the output
        picture.data[WIDGET] = {"model_id": picture.box.model_id, "version_major": 2, "version_minor": 0}
    return picture


def pipeline(ranks, microbatches, stages_per_rank, schedule, ratio):
    """Return the simulation of one setting of the sliders.

    Raises
    ------
    UserError
        The schedule cannot run with this setting.
    """
    usual = usual_stages_per_rank(schedule)
    stages_per_rank = max(2, stages_per_rank) if schedule.startswith("interleaved") else usual
    microbatches = 1 if schedule == "naive" else microbatches
    forward = [1 / stages_per_rank] * ranks * stages_per_rank
    return simulate(schedule, forward, [ratio * time for time in forward], microbatches, ranks, weight=0.5)


def describe(simulation) -> str:
    """Return the numbers of a simulation as one line."""
    ranks, stages_per_rank = simulation.ranks, simulation.stages_per_rank
    try:
        share = bubble.idle_share(simulation.schedule, ranks, simulation.microbatches, stages_per_rank)
        closed_form = f"closed form {share:.1%}"
    except UserError:
        closed_form = "no closed form"
    activations = max(simulation.peak_activations) / stages_per_rank
    return (
        f"step {simulation.step_time:.4g} {UNIT}, idle {simulation.idle_share:.1%}, {closed_form}, "
        f"{ranks * (1 - simulation.idle_share):.3g} times one device, "
        f"at most {activations:.3g} microbatches' activations on a rank"
    )


def sliders(**setting):
    """Return the widget: sliders above, the timeline and its numbers below; `setting` as `pipeline` takes it."""
    wide = {"style": {"description_width": "130px"}, "layout": w.Layout(width="400px")}
    slider = wide | {"continuous_update": False}  # one drawing when the slider is released
    controls = {
        "schedule": w.Dropdown(options=list(SCHEDULES), description="schedule", **wide),
        "ranks": w.IntSlider(min=1, max=16, description="ranks (P)", **slider),
        "microbatches": w.IntSlider(min=1, max=64, description="microbatches (M)", **slider),
        "stages_per_rank": w.IntSlider(min=2, max=4, description="stages per rank (v)", **slider),
        "ratio": w.FloatSlider(min=0.5, max=4, step=0.25, description="backward/forward", **slider),
    }
    line, picture = w.HTML(), w.Image(format="png", width=800)

    def draw(_=None):
        setting = {name: control.value for name, control in controls.items()}
        controls["stages_per_rank"].disabled = not setting["schedule"].startswith("interleaved")
        controls["microbatches"].disabled = setting["schedule"] == "naive"
        try:
            simulation = pipeline(**setting)
            line.value = describe(simulation)
            picture.value = base64.b64decode(timeline(ideal=simulation, unit=UNIT).data["image/png"])
        except UserError as error:  # the sliders reach settings that the schedule does not allow
            line.value, picture.value = str(error), b""

    for name, control in controls.items():
        control.value = setting[name]
        control.observe(draw, "value")
    draw()
    return w.VBox([*controls.values(), line, picture])

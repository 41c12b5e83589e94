"""A pipeline on sliders: the simulated timeline follows at once. Used in notebooks/05_pipeline.ipynb."""

from mpdemo.errors import UserError
from mpdemo.notebook.bundle import Bundle
from mpdemo.plan import SCHEDULES, bounds, simulate, usual_stages_per_rank

UNIT = "forward passes"  # of one microbatch through one rank's part of the model
WIDGET = "application/vnd.jupyter.widget-view+json"


def explore(ranks=4, microbatches=8, per_rank=2, schedule="1f1b", ratio=2.0, *, live=None):
    """Show a pipeline with sliders for everything that shapes its timeline.

    The unit of time is what one microbatch's forward takes on one rank, however many stages that rank's part of the
    model is cut into; so all schedules do the same work.

    Parameters
    ----------
    ranks, microbatches, per_rank : int
        P, M and v to begin with; v counts for the interleaved schedules only.
    schedule : str
        A name in ``mpdemo.plan.SCHEDULES``.
    ratio : float
        Time of a backward pass over that of a forward pass.
    live : bool, optional
        Whether somebody can move a slider; found out by itself.

    Returns
    -------
    Bundle
        The picture and one line of text; with a front end, the widget too.
    """
    from mpdemo.notebook.view import has_front_end

    values = {"ranks": ranks, "microbatches": microbatches, "per_rank": per_rank, "schedule": schedule, "ratio": ratio}
    shown = still(**values)
    if has_front_end() if live is None else live:
        box = sliders(**values)
        shown.data[WIDGET] = {"model_id": box.model_id, "version_major": 2, "version_minor": 0}
        shown.box = box  # kept alive as long as the output
    return shown


def pipeline(ranks, microbatches, per_rank, schedule, ratio):
    """Return the simulation for one setting of the sliders.

    Raises
    ------
    UserError
        What the schedule cannot do.
    """
    usual = usual_stages_per_rank(schedule)
    stages = max(2, per_rank) if schedule.startswith("interleaved") else usual
    microbatches = 1 if schedule == "naive" else microbatches
    count = ranks * stages
    return simulate(schedule, [1 / stages] * count, [ratio / stages] * count, microbatches, ranks, weight=0.5)


def describe(simulation):
    """Return the figures under the timeline, as one line."""
    stages = simulation.stages_per_rank
    words = [f"step {simulation.step_time:.4g} {UNIT}", f"idle {simulation.idle_share:.1%}"]
    try:
        shape = (simulation.schedule, simulation.ranks, simulation.microbatches, stages)
        words.append(f"closed form {bounds.idle_share(*shape):.1%}")
    except UserError:
        words.append("no closed form")
    speedup = simulation.ranks * (1 - simulation.idle_share)
    most = max(simulation.peak_activations) / stages
    words += [f"{speedup:.3g} times one device", f"at most {most:.3g} microbatches' activations on a rank"]
    return ", ".join(words)


def still(**values):
    """Return the picture for one setting, and a line of text."""
    from mpdemo.notebook import plots

    simulation = pipeline(**values)
    drawn = plots.timeline(ideal=simulation, unit=UNIT)
    return Bundle(f"{values['schedule']}: {describe(simulation)}", png=drawn.data["image/png"], width=800)


def sliders(**values):
    """Return the widget: sliders above, the timeline and its figures below."""
    import ipywidgets as w

    wide = {"style": {"description_width": "130px"}, "layout": w.Layout(width="400px")}
    controls = {
        "schedule": w.Dropdown(options=list(SCHEDULES), value=values["schedule"], description="schedule", **wide),
        "ranks": w.IntSlider(values["ranks"], 1, 16, description="ranks (P)", **wide),
        "microbatches": w.IntSlider(values["microbatches"], 1, 64, description="microbatches (M)", **wide),
        "per_rank": w.IntSlider(values["per_rank"], 2, 4, description="stages a rank (v)", **wide),
        "ratio": w.FloatSlider(values["ratio"], min=0.5, max=4, step=0.25, description="backward/forward", **wide),
    }
    picture = w.HTML()

    def draw(_=None):
        from mpdemo.notebook.plots.lanes import lanes

        setting = {name: control.value for name, control in controls.items()}
        controls["per_rank"].disabled = not setting["schedule"].startswith("interleaved")
        controls["microbatches"].disabled = setting["schedule"] == "naive"
        try:
            simulation = pipeline(**setting)
            picture.value = f"<div>{describe(simulation)}</div>{lanes(simulation)}"
        except UserError as refused:  # the sliders pass through settings that no schedule takes
            picture.value = f"<div>{refused}</div>"

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    return w.VBox([*controls.values(), picture])

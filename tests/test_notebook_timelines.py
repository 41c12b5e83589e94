"""Timelines with the memory over time: what each rank holds is counted from the operations."""

import pytest

from mpdemo.errors import UserError
from mpdemo.notebook import plots
from mpdemo.notebook.plots.timelines import activations_held
from mpdemo.plan import SCHEDULES, simulate


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "naive"])
def test_the_most_that_a_rank_holds_is_that_of_the_simulation(schedule):
    per_rank = SCHEDULES[schedule].stages_per_rank
    stages = 4 * per_rank
    simulation = simulate(schedule, [1] * stages, [2] * stages, 8, 4)
    lanes = activations_held(simulation.events)
    peaks = [max(count for _, count in lane) for lane in lanes]
    assert peaks == pytest.approx([peak / per_rank for peak in simulation.peak_activations])
    assert all(lane[-1][1] == 0 for lane in lanes)


def test_every_replica_holds_what_one_of_them_holds():
    events = simulate("1f1b", [1] * 2, [2] * 2, 4, 2).events
    both = activations_held(events + [row | {"rank": row["rank"] + 2} for row in events])
    assert both == 2 * activations_held(events)


def test_the_picture_has_the_memory_under_each_timeline_and_names_the_most():
    simulations = {"GPipe": simulate("gpipe", [1] * 4, [2] * 4, 8, 4), "1F1B": simulate("1f1b", [1] * 4, [2] * 4, 8, 4)}
    both = plots.timelines(simulations)
    assert repr(both) == (
        "timelines of GPipe (a rank holds at most 8 microbatches), 1F1B (a rank holds at most 4 microbatches)"
    )
    assert [axes.get_title(loc="left")[:5] for axes in both.figure.axes] == ["GPipe", "", "1F1B:", ""]
    alone = plots.timelines(simulations, memory=False)
    assert repr(alone) == "timelines of GPipe, 1F1B" and len(alone.figure.axes) == 2


def test_nothing_to_draw_is_refused():
    for nothing in ({}, {"GPipe": []}):
        with pytest.raises(UserError, match="no operations to draw"):
            plots.timelines(nothing)

"""The sliders: every setting gives a timeline or a reason, and a picture stands in where nobody can slide."""

import itertools

import pytest

from mpdemo.errors import UserError
from mpdemo.notebook import explorer
from mpdemo.notebook.plots.lanes import lanes
from mpdemo.plan import SCHEDULES


def test_without_a_front_end_there_is_a_picture_and_a_line_that_says_the_same_everywhere():
    shown = explorer.explore(live=False)
    assert set(shown.data) == {"text/plain", "image/png"}
    assert repr(shown) == (
        "1f1b: step 33 forward passes, idle 27.3%, closed form 27.3%, 2.91 times one device, "
        "at most 4 microbatches' activations on a rank"
    )


def test_moving_a_slider_redraws():
    box = explorer.sliders(ranks=4, microbatches=8, per_rank=2, schedule="1f1b", ratio=2.0)
    schedule, ranks, microbatches, per_rank, _, picture = box.children
    assert per_rank.disabled and "idle 27.3%" in picture.value and "<svg" in picture.value
    microbatches.value = 64
    assert "idle 4.5%" in picture.value
    schedule.value = "interleaved-1f1b"
    assert not per_rank.disabled and "idle 2.3%" in picture.value
    microbatches.value, ranks.value = 5, 2
    assert "do not divide into equal rounds" in picture.value and "<svg" not in picture.value
    microbatches.value = 6
    assert "<svg" in picture.value


def test_with_a_front_end_the_picture_stays_for_those_who_only_read():
    shown = explorer.explore(live=True)
    assert {"text/plain", "image/png", explorer.WIDGET} == set(shown.data)
    assert shown.data[explorer.WIDGET]["model_id"] == shown.box.model_id


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_setting_gives_a_drawing_or_a_reason(schedule):
    drawn = 0
    for ranks, microbatches, per_rank in itertools.product((1, 2, 5, 16), (1, 7, 64), (2, 4)):
        try:
            simulation = explorer.pipeline(ranks, microbatches, per_rank, schedule, 2.0)
        except UserError as refused:
            assert "allowed: " in str(refused)
            continue
        picture = lanes(simulation)
        assert picture.count("<path") == 8 and f"rank {ranks - 1}<" in picture
        assert f"idle {simulation.idle_share:.0%}" in picture
        drawn += 1
    assert drawn >= 8

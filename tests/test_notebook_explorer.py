"""The sliders: every setting gives a timeline or a reason; without a front end there is a picture."""

import itertools

import pytest

from mpdemo.errors import UserError
from mpdemo.notebook import explorer
from mpdemo.plan import SCHEDULES

PNG = b"\x89PNG"


def test_without_a_front_end_there_is_a_picture_and_a_reproducible_line():
    shown = explorer.explore(live=False)
    assert set(shown.data) == {"text/plain", "image/png"}
    assert repr(shown) == (
        "1f1b: step 33 forward passes, idle 27.3%, closed form 27.3%, 2.91 times one device, "
        "at most 4 microbatches' activations on a rank"
    )


def test_moving_a_slider_redraws():
    box = explorer.sliders(ranks=4, microbatches=8, stages_per_rank=2, schedule="1f1b", ratio=2.0)
    schedule, ranks, microbatches, stages_per_rank, _, line, picture = box.children
    assert stages_per_rank.disabled and "idle 27.3%" in line.value and bytes(picture.value).startswith(PNG)
    first = bytes(picture.value)
    microbatches.value = 64
    assert "idle 4.5%" in line.value and bytes(picture.value) != first
    schedule.value = "interleaved-1f1b"
    assert not stages_per_rank.disabled and "idle 2.3%" in line.value
    microbatches.value, ranks.value = 5, 2
    assert "do not divide into equal rounds" in line.value and not bytes(picture.value)
    microbatches.value = 6
    assert bytes(picture.value).startswith(PNG)


def test_with_a_front_end_the_output_has_the_picture_too():
    shown = explorer.explore(live=True)
    assert {"text/plain", "image/png", explorer.WIDGET} == set(shown.data)
    assert shown.data[explorer.WIDGET]["model_id"] == shown.box.model_id


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_setting_gives_a_simulation_or_a_reason(schedule):
    simulated = 0
    for ranks, microbatches, stages_per_rank in itertools.product((1, 2, 5, 16), (1, 7, 64), (2, 4)):
        try:
            simulation = explorer.pipeline(ranks, microbatches, stages_per_rank, schedule, 2.0)
        except UserError as error:
            assert "allowed: " in str(error)
            continue
        assert f"idle {simulation.idle_share:.1%}" in explorer.describe(simulation)
        simulated += 1
    assert simulated >= 8

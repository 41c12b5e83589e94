"""Step times put together from measured parts, against sums on paper. `make bench` compares them with real steps."""

import json

import pytest
from worlds import run_worlds

from mpdemo.errors import UserError
from mpdemo.labs.step_times import CASES, row_of
from mpdemo.notebook.story import story
from mpdemo.plan import predict
from mpdemo.plan.cost import BlockCost
from mpdemo.plan.step_time import Speeds, few_images, images_at_once, seconds, where
from mpdemo.settings import Settings, checked

BLOCK = BlockCost(forward=1.0, backward=2.0, input=1.0, weight=1.0)  # whatever its size: microbatches save nothing
NOTHING = BlockCost(*4 * [1e-12])
FACTORS = {"alone": 1, "together": 2, "split layers": 4 / 3, "split tokens": 5 / 3}
GRID = {"rung": "tensor", "processes": 4, "replicas": 2}


def settings(rung, **changes):
    words = story(rung, timeline=False, cut=None, schedule="1f1b", **changes)
    return checked(Settings(**words), None if rung == "single" else words.get("processes", 2))


@pytest.fixture(scope="module")
def blocks():
    """Ten blocks: eight equal ones between two small ones."""
    return predict.blocks_of(settings("single"))


def predicted(blocks, rung, per_byte=0.0, few=0.0, **changes):
    """Blocks of 3 s on one device, 6 s on two at once, 4 or 5 s where two split them; few images take nothing."""
    s, costs = settings(rung, **changes), {}
    images = images_at_once(few_images(s))
    for place, factor in FACTORS.items():
        block = BlockCost(*(factor * x for x in BLOCK))
        costs |= {(place, images_at_once(s)): [block] * len(blocks), (place, images): [NOTHING] * len(blocks)}
    return seconds(s, blocks, Speeds(costs, {few_images(s): few}, per_byte))


def test_one_device_computes_its_blocks_beside_what_no_image_needs(blocks):
    assert predicted(blocks, "single", few=5) == pytest.approx(5 + 30)
    assert predicted(blocks, "single", few=5, accumulate=4) == pytest.approx(5 + 4 * 30)
    assert predicted(blocks, "single", few=5, activation_checkpointing=True) == pytest.approx(5 + 40)


def test_the_blocks_of_few_images_are_part_of_their_step(blocks):
    s, costs = settings("single"), {("alone", 64): [BLOCK] * len(blocks), ("alone", 16): [BLOCK] * len(blocks)}
    assert seconds(s, blocks, Speeds(costs, {few_images(s): 31.0}, 0.0)) == pytest.approx(31)


@pytest.mark.parametrize("rung", ["ddp", "fsdp"])
def test_replicas_share_the_memory_of_the_cores(blocks, rung):
    assert predicted(blocks, rung, few=5) == pytest.approx(5 + 2 * 30)
    assert predicted(blocks, rung, few=5, accumulate=2) == pytest.approx(5 + 2 * 2 * 30)
    assert predicted(blocks, rung, few=5, activation_checkpointing=True) == pytest.approx(5 + 2 * 40)


def test_split_blocks_are_measured_as_they_run(blocks):
    assert predicted(blocks, "tensor", few=5) == pytest.approx(5 + 40)
    assert predicted(blocks, "tensor", few=5, sequence_parallel=True) == pytest.approx(5 + 50)
    assert predicted(blocks, "tensor", few=5, accumulate=2) == pytest.approx(5 + 2 * 40)


def test_a_cut_model_sends_more_with_more_images(blocks):
    assert predicted(blocks, "model_parallel", few=5) == pytest.approx(5 + 30)  # one device at a time
    there_and_back = 2 * (64 - 16) * blocks[4].output / 1e9
    assert predicted(blocks, "model_parallel", per_byte=1e-9) == pytest.approx(30 + there_and_back)


def test_a_pipeline_has_its_bubble(blocks):
    assert predicted(blocks, "pipeline", few=5, microbatches=4) == pytest.approx(5 + (4 + 1) * 2 * 15)
    assert predicted(blocks, "pipeline", microbatches=4, accumulate=2) == pytest.approx(2 * (4 + 1) * 2 * 15)
    grid = predicted(blocks, "hybrid", microbatches=4, processes=4, few=0.5)
    assert grid == pytest.approx((4 + 1) * 2 * 15 + 0.5)


def test_few_images_are_a_quarter_and_at_least_two_for_each_device_and_part():
    assert few_images(settings("single")).batch_size == 16
    assert few_images(settings("fsdp", accumulate=8)).batch_size == 2 * 8 * 2  # of four; batch norm refuses one
    assert few_images(settings("fsdp", accumulate=32)).batch_size == 2 * 32  # there is but one
    assert few_images(settings("tensor", accumulate=4)).batch_size == 16
    assert checked(few_images(settings("ddp", micro_batch_size=16)), 2).microbatches == 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_every_case_of_the_lab_is_predicted(blocks, case):
    """Each takes at least its share of the work of two devices, and at most all of it three times."""
    s = checked(Settings(**story(**case)), None if case["rung"] == "single" else 2)
    few = few_images(s)
    costs = {
        (where(s), images_at_once(s)): [BLOCK] * len(blocks),
        (where(s), images_at_once(few)): [NOTHING] * len(blocks),
    }
    parts = s.accumulate * s.microbatches
    assert parts * 30 / 2 <= seconds(s, blocks, Speeds(costs, {few: 0.0}, 0.0)) <= 3 * parts * 30


def test_a_round_compares_its_own_prediction_with_its_own_steps():
    """The machine became half as fast in the last round, before its parts were measured again."""
    row = row_of([0.8, 1.0, 2.4], [1.0, 1.0, 2.0])
    assert row["ratios"] == pytest.approx([0.8, 1.0, 1.2]) and row["ratio"] == 1.0
    assert (row["predicted"], row["measured"]) == (1.0, 1.0)


def test_the_lab_measures_predicts_and_does_the_steps(tmp_path):
    """One round of trainings with each kind of blocks; how near they come is for `make bench` to say."""
    run_worlds(tmp_path, [[2, "tests/programs/step_times.py", str(tmp_path)]])
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [row["case"].split()[1] for row in rows] == ["single", "ddp", "pipeline", "tensor", "tensor"]
    for row in rows:
        assert row["predicted"] > 0 and row["measured"] > 0 and len(row["ratios"]) == 1, row


@pytest.mark.parametrize(
    "words",
    [
        {"rung": "data_parallel"},
        GRID,
        {"rung": "hybrid", "sharded": True},
        {"form": "one-process"},
        {"precision": "bf16"},
        {"rung": "ddp", "compile": True},
    ],
)
def test_what_is_not_predicted_is_refused(blocks, words):
    s = checked(Settings(**{"rung": "pipeline", "model": "transformer"} | words))
    with pytest.raises(UserError, match="no step time is predicted for rung .*; allowed: single, ddp"):
        seconds(s, blocks, None)

"""Step times put together from measured parts, against sums on paper. `make bench` compares them with real steps."""

import pytest

from mpdemo.errors import UserError
from mpdemo.labs.step_times import CASES
from mpdemo.notebook.story import story
from mpdemo.plan import predict
from mpdemo.plan.cost import BlockCost
from mpdemo.plan.step_time import Speeds, images_at_once, seconds
from mpdemo.settings import Settings, checked

BLOCK = BlockCost(forward=1.0, backward=2.0, input=1.0, weight=1.0)  # whatever its size: microbatches save nothing
SIZES = (64, 32, 16, 8)


def settings(rung, **changes):
    words = story(rung, timeline=False, cut=None, schedule="1f1b", **changes)
    return checked(Settings(**words), None if rung == "single" else words.get("processes", 2))


@pytest.fixture(scope="module")
def blocks():
    """Ten blocks: eight equal ones between two small ones."""
    return predict.blocks_of(settings("single"))


def predicted(blocks, rung, update=0.0, send=(0.0, 0.0), reduce=(0.0, 0.0), **changes):
    costs = {size: [BLOCK] * len(blocks) for size in SIZES}
    doubled = {size: [BlockCost(*(2 * x for x in block)) for block in costs[size]] for size in SIZES}
    return seconds(
        settings(rung, **changes), blocks, Speeds(costs, doubled, update, {"send": send, "all-reduce": reduce})
    )


def test_one_device_computes_its_blocks_and_updates_its_weights(blocks):
    weights = sum(block.weights for block in blocks)
    assert predicted(blocks, "single", update=1e-6) == pytest.approx(30 + 1e-6 * weights)
    assert predicted(blocks, "single", accumulate=4) == pytest.approx(4 * 30)
    assert predicted(blocks, "single", activation_checkpointing=True) == pytest.approx(40)


def test_replicas_share_the_memory_of_the_cores_and_average(blocks):
    weights = sum(block.weights for block in blocks)
    assert predicted(blocks, "ddp") == pytest.approx(2 * 30)  # the costs with all devices at work
    assert predicted(blocks, "ddp", reduce=(0.5, 1e-6)) == pytest.approx(60 + 2 * 0.5 + 1e-6 * weights)


def test_a_cut_model_waits_for_its_messages_and_the_larger_stage_updates(blocks):
    half = max(sum(block.weights for block in part) for part in (blocks[:5], blocks[5:]))
    assert predicted(blocks, "model_parallel") == pytest.approx(30)  # one device at a time
    there_and_back = 2 * (0.25 + 64 * blocks[4].output / 1e9)
    assert predicted(blocks, "model_parallel", update=1e-6, send=(0.25, 1e-9)) == pytest.approx(
        30 + there_and_back + 1e-6 * half
    )


def test_a_pipeline_has_its_bubble(blocks):
    assert predicted(blocks, "pipeline", microbatches=4) == pytest.approx((4 + 1) * 2 * 15)
    assert predicted(blocks, "pipeline", microbatches=4, accumulate=2) == pytest.approx(2 * (4 + 1) * 2 * 15)
    grid = predicted(blocks, "hybrid", microbatches=4, processes=4, reduce=(0.5, 0.0))
    assert grid == pytest.approx((4 + 1) * 2 * 15 + 0.5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_every_case_of_the_lab_is_predicted(blocks, case):
    """Each takes at least its share of the work of two devices, and at most all of it three times."""
    s = checked(Settings(**story(**case)), None if case["rung"] == "single" else 2)
    costs = {size: [BLOCK] * len(blocks) for size in {images_at_once(s)}}
    speeds = Speeds(costs, costs, 0.0, {"send": (0.0, 0.0), "all-reduce": (0.0, 0.0)})
    parts = s.accumulate * s.microbatches
    assert parts * 30 / 2 <= seconds(s, blocks, speeds) <= 3 * parts * 30


@pytest.mark.parametrize("words", [{"rung": "fsdp"}, {"rung": "hybrid", "sharded": True}, {"form": "one-process"}])
def test_what_is_not_predicted_is_refused(blocks, words):
    s = checked(Settings(**{"rung": "pipeline", "model": "transformer"} | words))
    with pytest.raises(UserError, match="no step time is predicted for rung .*; allowed: single, ddp"):
        seconds(s, blocks, None)

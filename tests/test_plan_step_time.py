"""Step times put together from measured parts, against sums on paper. `make bench` compares them with real steps."""

import pytest

from mpdemo.errors import UserError
from mpdemo.labs.step_times import CASES
from mpdemo.notebook.story import story
from mpdemo.plan import predict
from mpdemo.plan.cost import BlockCost
from mpdemo.plan.step_time import Speeds, fewest_images, images_at_once, seconds
from mpdemo.settings import Settings, checked

BLOCK = BlockCost(forward=1.0, backward=2.0, input=1.0, weight=1.0)  # whatever its size: microbatches save nothing
GRID = {"rung": "tensor", "processes": 4, "replicas": 2}
SIZES = (64, 32, 16, 8, 1)


def settings(rung, **changes):
    words = story(rung, timeline=False, cut=None, schedule="1f1b", **changes)
    return checked(Settings(**words), None if rung == "single" else words.get("processes", 2))


@pytest.fixture(scope="module")
def blocks():
    """Ten blocks: eight equal ones between two small ones."""
    return predict.blocks_of(settings("single"))


def times(costs, factor):
    return {size: [BlockCost(*(factor * x for x in block)) for block in blocks] for size, blocks in costs.items()}


def predicted(blocks, rung, update=0.0, send=(0.0, 0.0), reduce=(0.0, 0.0), least=0.0, add_up=0.0, **changes):
    """Blocks of 3 s on one device, 6 s on two at once and 4 s where two split them; an image alone takes nothing."""
    s, costs = settings(rung, **changes), {size: [BLOCK] * len(blocks) for size in SIZES}
    nothing = {1: [BlockCost(0, 0, 0, 0)] * len(blocks)}
    speeds = Speeds(
        alone=costs,
        together=times(costs, 2) | nothing,
        update=update,
        messages={"send": send, "all-reduce": reduce},
        split=times(costs, 4 / 3) | nothing,
        sums={size: size * add_up for size in SIZES},
        fewest={fewest_images(s): least},
    )
    return seconds(s, blocks, speeds)


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


def test_what_sharding_adds_is_measured_with_few_images_and_the_rest_computed(blocks):
    assert predicted(blocks, "fsdp", least=5.0) == pytest.approx(5 + 60)
    assert predicted(blocks, "fsdp", least=5.0, accumulate=2) == pytest.approx(5 + 2 * 60)
    assert predicted(blocks, "fsdp", least=5.0, activation_checkpointing=True) == pytest.approx(5 + 80)
    sums = 6 * 8  # in each of the eight blocks between the ends
    assert predicted(blocks, "tensor", least=5.0, add_up=1e-3) == pytest.approx(5 + 40 + sums * (64 - 1) * 1e-3)
    in_two_parts = 5 + 2 * 40 + 2 * sums * (32 - 1) * 1e-3
    assert predicted(blocks, "tensor", least=5.0, add_up=1e-3, accumulate=2) == pytest.approx(in_two_parts)


def test_few_images_are_one_for_each_device_and_part():
    assert fewest_images(settings("fsdp", accumulate=4)).batch_size == 2 * 4
    assert fewest_images(settings("tensor", accumulate=4)).batch_size == 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_every_case_of_the_lab_is_predicted(blocks, case):
    """Each takes at least its share of the work of two devices, and at most all of it three times.

    Of split layers only what tensor parallelism needs is measured.
    """
    s = checked(Settings(**story(**case)), None if case["rung"] == "single" else 2)
    costs = {images_at_once(s): [BLOCK] * len(blocks), 1: [BlockCost(0, 0, 0, 0)] * len(blocks)}
    no_messages = {"send": (0.0, 0.0), "all-reduce": (0.0, 0.0)}
    split = costs if s.rung == "tensor" else {1: costs[1]}
    speeds = Speeds(costs, costs, 0.0, no_messages, split, dict.fromkeys(split, 0.0), {fewest_images(s): 0.0})
    parts = s.accumulate * s.microbatches
    assert parts * 30 / 2 <= seconds(s, blocks, speeds) <= 3 * parts * 30


@pytest.mark.parametrize(
    "words", [{"rung": "data_parallel"}, GRID, {"rung": "hybrid", "sharded": True}, {"form": "one-process"}]
)
def test_what_is_not_predicted_is_refused(blocks, words):
    s = checked(Settings(**{"rung": "pipeline", "model": "transformer"} | words))
    with pytest.raises(UserError, match="no step time is predicted for rung .*; allowed: single, ddp"):
        seconds(s, blocks, None)

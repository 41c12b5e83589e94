"""What blocks cost: measured on this machine, and estimated for GPUs that are not here."""

import pytest
import torch

from mpdemo.errors import UserError
from mpdemo.models import build
from mpdemo.plan import cost, footprint


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_measuring_finds_the_expensive_block_and_leaves_no_gradients(one_thread):
    small, large = torch.nn.Linear(8, 512), torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
    from mpdemo.models import Blocks

    blocks = Blocks({"small": small, "large": large, "head": torch.nn.Linear(512, 10)})
    costs = cost.measure(dict.fromkeys((64, 256), blocks), torch.randn(256, 8))
    assert set(costs) == {64, 256}
    for row in costs.values():
        assert row[1].both > row[0].both and row[1].both > row[2].both
        assert row[0].input == 0 and row[0].weight == row[0].backward  # images need no gradient
        assert row[1].input > 0 and row[1].weight > 0
    assert all(parameter.grad is None for parameter in blocks.parameters())


def test_sizes_beyond_the_budget_are_extrapolated_upwards(one_thread):
    blocks = build("convnet", image_size=28)
    costs = cost.measure(dict.fromkeys((2, 4, 32, 64), blocks), torch.randn(64, 1, 28, 28), repeats=1, budget=0.0)
    assert set(costs) == {2, 4, 32, 64}
    totals = [sum(block.both for block in costs[size]) for size in sorted(costs)]
    assert totals[1:] == sorted(totals[1:])  # the smallest two are measured, and may come out the other way round
    assert totals[3] > 1.5 * totals[2]


def test_a_size_between_two_measured_ones_lies_on_their_line():
    measured = {n: [cost.BlockCost(n, 2.0 * n, n, n), cost.BlockCost(1.0, 0.0, 1.0, n)] for n in (2, 8, 32)}
    assert cost.at(measured, 8) is measured[8]
    for size in (1, 5, 20, 64):
        assert cost.at(measured, size)[0] == cost.BlockCost(size, 2.0 * size, size, size)
    assert cost.at(measured, 20)[1].forward == 1.0
    rising = {2: [cost.BlockCost(1.0, 1.0, 1.0, 1.0)], 4: [cost.BlockCost(9.0, 1.0, 1.0, 1.0)]}
    assert cost.at(rising, 1)[0].forward == 0.0  # no time is below zero


def test_a_last_block_may_return_any_shape(one_thread):
    from mpdemo.models import Blocks

    words = Blocks({"words": torch.nn.Embedding(8, 4), "next": torch.nn.Linear(4, 8)})
    costs = cost.measure(dict.fromkeys((2, 4), words), torch.zeros(4, 6, dtype=torch.int64), repeats=1, halves=False)
    assert all(block.both > 0 and block.weight in (0, block.backward) for row in costs.values() for block in row)


def test_measured_blocks_are_those_of_the_model(one_thread):
    blocks = build("resnet18", classes=10, channels=3, image_size=32)
    costs = cost.measure(dict.fromkeys((2, 4), blocks), torch.randn(4, 3, 32, 32), repeats=1)
    assert [len(row) for row in costs.values()] == [len(blocks)] * 2


@pytest.mark.parametrize("gpu", footprint.ROOFS)
def test_the_usual_cut_of_resnet101_is_unbalanced_on_every_gpu(gpu):
    """Measured on a CPU, the blocks up to layer2 are 0.285 of the work; the estimate agrees without measuring."""
    costs = footprint.estimate("resnet101", [16], 224, gpu)[16]
    share = sum(block.both for block in costs[:8]) / sum(block.both for block in costs)
    assert share == pytest.approx(0.285, abs=0.02)


def test_small_microbatches_cost_more_a_sample_on_a_gpu():
    costs = footprint.estimate("resnet50", [1, 16], 224, "v100")
    one, sixteen = (sum(block.both for block in costs[size]) / size for size in (1, 16))
    assert one > 1.3 * sixteen


def test_an_unknown_gpu_is_refused():
    with pytest.raises(UserError, match="allowed: v100, a100, h100"):
        footprint.estimate("resnet18", [1], 64, "rtx")

"""Memory on fake tensors: against two GPUs that were measured, and against the same steps on real tensors."""

import pytest

from mpdemo.errors import UserError
from mpdemo.plan import memory
from mpdemo.plan.footprint import footprints
from mpdemo.plan.planner import Job, evaluate

MIB = memory.MIB


def test_two_measured_gpus_are_met_within_two_percent():
    """ResNet-101, batch 128 in 16 parts, cut after layer2, SGD, float32, one process: 7950 and 8224 MiB on two V100.

    The first GPU is met to a third of a MiB. On the second 73 MiB (0.9 %) are missing, and they are no tensors: two
    identical runs there reported 8224 and 8219 MiB, while the tensors of a step are the same in every run. What
    differs from run to run, lies in PyTorch's allocator, and is needed while layer3 and layer4 go backward, where the
    second GPU reaches its peak, is the workspace that cuDNN chooses for its convolutions.
    """
    first, second = memory.estimate(
        "resnet101", [8], 128, 224, form="one-process", microbatches=16, keep_gradients=True
    )
    assert first.peak / MIB == pytest.approx(7950, rel=0.02)
    assert second.peak / MIB == pytest.approx(8224, rel=0.02)
    assert first.peak / MIB == pytest.approx(7950, abs=1)
    assert 0 < 8224 - second.peak / MIB < 100
    assert first.weights < second.weights  # few parameters and large activations come first in a ResNet
    assert first.activations + first.weights + first.gradients + first.optimizer == first.peak


@pytest.mark.parametrize("schedule, points", [("gpipe", [5]), ("1f1b", [5]), ("zbv", [3, 5, 7])])
def test_fake_tensors_take_as_much_as_real_ones(schedule, points, monkeypatch):
    """The same rank of the library's schedule, once without storage and once really computed."""
    import torch

    arguments = ("resnet18", points, 16, 64)
    fake = memory.estimate(*arguments, schedule=schedule, microbatches=8, optimizer="momentum", classes=10)

    class Real:
        def __init__(self, **_):
            pass

        def __enter__(self):
            torch.set_num_threads(1)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode", Real)
    real = memory.estimate(*arguments, schedule=schedule, microbatches=8, optimizer="momentum", classes=10)
    assert [d.peak for d in fake] == pytest.approx([d.peak for d in real], rel=0.01)


def test_1f1b_needs_less_than_gpipe_and_momentum_adds_a_copy_of_the_parameters():
    gpipe = memory.estimate("resnet18", [5], 32, 64, schedule="gpipe", microbatches=8)
    one = memory.estimate("resnet18", [5], 32, 64, schedule="1f1b", microbatches=8)
    assert one[0].activations < 0.5 * gpipe[0].activations
    momentum = memory.estimate("resnet18", [5], 32, 64, schedule="1f1b", microbatches=8, optimizer="momentum")
    assert [d.optimizer for d in one] == [0, 0]
    assert [d.optimizer for d in momentum] == [d.gradients for d in momentum]


@pytest.mark.parametrize("schedule, points", [("gpipe", [5]), ("1f1b", [4]), ("interleaved-1f1b", [3, 5, 7])])
def test_the_sum_of_footprints_is_near_what_a_whole_step_takes(schedule, points):
    blocks = footprints("resnet18", 64, classes=10)
    candidate = evaluate(Job(blocks, {}, ranks=2, batch=64), schedule, 8, points)
    step = memory.estimate("resnet18", points, 64, 64, schedule=schedule, microbatches=8, classes=10)
    assert candidate.peaks == pytest.approx([device.peak for device in step], rel=0.15)


def test_footprints_count_every_parameter_once():
    import torch

    from mpdemo.models import build

    with torch.device("meta"):
        whole = build("resnet50", classes=1000, channels=3, image_size=224)
    blocks = footprints("resnet50", 224)
    assert [block.name for block in blocks] == whole.names
    assert sum(block.parameters for block in blocks) == sum(p.numel() for p in whole.parameters())
    assert blocks[0].input == 3 * 224 * 224 * 4
    assert all(a.output == b.input for a, b in zip(blocks, blocks[1:], strict=False))


@pytest.mark.parametrize("wrong", [{"optimizer": "adagrad"}, {"form": "two-process"}])
def test_unknown_words_are_refused(wrong):
    with pytest.raises(UserError, match="allowed: "):
        memory.estimate("resnet18", [5], 8, 64, **wrong)

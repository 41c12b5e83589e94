"""Memory counted in a dry run: against two GPUs that were measured, and the sum over blocks against the dry run."""

from dataclasses import replace

import pytest
import torch

from mpdemo import models
from mpdemo.errors import UserError
from mpdemo.predict import dry_run, memory
from mpdemo.predict.counting import LiveMemory, rounded
from mpdemo.predict.footprint import footprints
from mpdemo.predict.planner import evaluate
from mpdemo.predict.request import MIB, STATES, ModelSpec, PlanRequest, settled
from mpdemo.tools.plan.fits import each_stage

SMALL = ModelSpec("transformer", 28, 10, 1)


def test_two_measured_gpus_are_met_within_two_percent():
    """ResNet-101, batch 128 in 16 parts, cut after layer2, SGD, float32, one process: 7950 and 8224 MiB on two V100.

    The first GPU is met to a third of a MiB. On the second 73 MiB (0.9 %) are missing, and they are no tensors: two
    identical runs there reported 8224 and 8219 MiB, while the tensors of a step are the same in every run. What
    differs from run to run is the workspace that cuDNN chooses for its convolutions.
    """
    spec, options = ModelSpec("resnet101"), {"form": "one-process", "microbatches": 16, "cut": "8"}
    s = settled(spec, "pipeline", 128, 2, **options)
    first, second = memory.of_rank(spec, s, 0, STATES["sgd"], True).devices
    assert first.peak / MIB == pytest.approx(7950, abs=1)
    assert second.peak / MIB == pytest.approx(8151, abs=1)
    assert 0 < 8224 - second.peak / MIB < 100
    assert first.weights < second.weights  # few parameters and large activations come first in a ResNet
    assert first.activations + first.weights + first.gradients + first.optimizer == first.peak


@pytest.mark.parametrize(
    ("rung", "more"),
    [
        ("fsdp", {"microbatches": 4}),
        ("pipeline", {"schedule": "GPipe", "microbatches": 8}),
        ("pipeline", {"schedule": "ZBVZeroBubble", "microbatches": 12}),
        ("hybrid", {"schedule": "1F1B", "microbatches": 8, "replicas": 2, "sharded": True}),
    ],
)
def test_many_microbatches_are_counted_as_few_are(rung, more):
    s = settled(SMALL, rung, 96, 2, **more)
    few, all_of_them = memory.of_rank(SMALL, s, 0, 2), dry_run.step(SMALL, s, 0, 2)
    assert few.messages == all_of_them.messages
    assert few.devices[0].peak == pytest.approx(all_of_them.devices()[0].peak, rel=0.01)


@pytest.mark.parametrize(("schedule", "points"), [("1F1B", [5]), ("Interleaved1F1B", [3, 5, 7])])
def test_the_sum_over_blocks_is_near_the_dry_run(schedule, points):
    request = PlanRequest("resnet18", batch=32, devices=2, image_size=64, classes=10)
    found = each_stage(request, schedule, 8, ",".join(map(str, points)))
    assert evaluate(request, schedule, 8, points).peaks == pytest.approx([device.peak for device in found], rel=0.15)


def test_1f1b_needs_less_than_gpipe_and_momentum_adds_a_copy_of_the_parameters():
    request = PlanRequest("resnet18", batch=32, devices=2, image_size=64, optimizer="sgd")
    gpipe, one = (each_stage(request, schedule, 8, "5") for schedule in ("GPipe", "1F1B"))
    assert one[0].activations < 0.5 * gpipe[0].activations
    momentum = each_stage(replace(request, optimizer="momentum"), "1F1B", 8, "5")
    assert [d.optimizer for d in one] == [0, 0]
    assert [d.optimizer for d in momentum] == [d.gradients for d in momentum]


def test_a_dry_run_leaves_nothing_behind():
    s = settled(SMALL, "pipeline", 8, 2, microbatches=2, cut="no such block")
    with pytest.raises(UserError, match="cannot cut"):
        memory.processes(SMALL, s, STATES["sgd"])
    assert not torch.distributed.is_initialized() and torch.nn.Module.to.__module__ == "torch.nn.modules.module"


def test_memory_is_counted_inside_another_count_and_storages_are_resized_as_before():
    own = torch.UntypedStorage.__dict__.get("resize_")
    with LiveMemory() as outer:
        with LiveMemory() as inner:
            tensor = torch.zeros(1024)
            tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(8192)
    assert inner.peak() == 4096 and inner.live["cpu"] == 0 and outer.live["cpu"] == 8192
    assert torch.UntypedStorage.__dict__.get("resize_") is own


def test_footprints_count_every_parameter_once():
    whole = models.build("resnet50", classes=1000, channels=3, image_size=224)
    blocks = footprints(ModelSpec("resnet50"))
    assert [block.name for block in blocks] == whole.names
    assert sum(block.gradients for block in blocks) == sum(rounded(p.nbytes) for p in whole.parameters())
    assert blocks[0].input == 3 * 224 * 224 * 4
    assert all(a.output == b.input for a, b in zip(blocks, blocks[1:], strict=False))


def test_gradients_are_counted_only_where_they_are_at_the_peak():
    def one(rung, devices=1, **more):
        counted = memory.processes(SMALL, settled(SMALL, rung, 64, devices, **more), 2)[0]
        return counted.devices[0], counted

    single, _ = one("single")
    ddp, counted = one("ddp", 2)
    parts, _ = one("single", microbatches=4)
    assert single.gradients < 0.001 * single.weights  # the backward pass has only begun, and a step begins with none
    assert ddp.gradients == counted.trained == counted.messages["all-reduce"]  # the buckets keep them
    assert parts.gradients == counted.trained  # those of the parts before

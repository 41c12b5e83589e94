"""Memory added up from footprints: against two GPUs that were measured, and against whole steps on real tensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpdemo import models
from mpdemo.errors import UserError
from mpdemo.parallel.per_device import SCHEDULE_CLASSES
from mpdemo.plan import SCHEDULES, memory, placement
from mpdemo.plan.footprint import _footprints, footprints, needs
from mpdemo.plan.meter import Meter
from mpdemo.plan.planner import Workload, evaluate

MIB = memory.MIB


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    assert second.peak / MIB == pytest.approx(8151, abs=1)  # the step's tensors, counted in a run on fake tensors
    assert 0 < 8224 - second.peak / MIB < 100
    assert first.weights < second.weights  # few parameters and large activations come first in a ResNet
    assert first.activations + first.weights + first.gradients + first.optimizer == first.peak


def step_of_one_rank(model, points, batch, size, schedule, microbatches, rank):
    """Run two steps of one rank with PyTorch's fake process group; return the peak of the second, in bytes."""
    owners = placement(schedule, (len(points) + 1) // SCHEDULES[schedule].stages_per_rank)
    dist.init_process_group("fake", rank=rank, world_size=1 + max(owners), store=FakeStore())
    try:
        with Meter() as meter:
            stages, x = [], torch.zeros(batch // microbatches, 3, size, size)
            for number, part in enumerate(models.build(model, classes=10, channels=3, image_size=size).cut(points)):
                with torch.no_grad():
                    y = part(x)
                ends = [t.detach().to("meta").requires_grad_(needed) for t, needed in ((x, number > 0), (y, True))]
                if owners[number] == rank:
                    stages.append(PipelineStage(part, number, len(owners), torch.device("cpu"), *ends))
                x = y
            del part, x, y, ends  # the other ranks' stages are not on this device
            schedule = SCHEDULE_CLASSES[schedule](
                stages if len(stages) > 1 else stages[0], n_microbatches=microbatches, loss_fn=cross_entropy
            )
            for _ in range(2):
                meter.start()
                for stage in stages:
                    stage.submod.zero_grad()
                images = [torch.zeros(batch, 3, size, size)] if owners[0] == rank else []
                labels = {"target": torch.zeros(batch, dtype=torch.long)} if owners[-1] == rank else {}
                schedule.step(*images, **labels)
                del images, labels
            return meter.base + max(meter.levels)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "schedule, points",
    [("gpipe", [5]), ("1f1b", [5]), ("interleaved-1f1b", [3, 5, 7]), ("zbv", [3, 5, 7])],
)
def test_the_sum_of_footprints_is_what_a_whole_step_takes(schedule, points):
    estimated = memory.estimate("resnet18", points, 16, 64, schedule=schedule, microbatches=4, classes=10)
    real = [step_of_one_rank("resnet18", points, 16, 64, schedule, 4, device.device) for device in estimated]
    bound = 0.05 if schedule == "zbv" else 0.04  # there PyTorch 2.14 keeps more than 2.15
    assert [device.peak for device in estimated] == pytest.approx(real, rel=bound)


def test_1f1b_needs_less_than_gpipe_and_momentum_adds_a_copy_of_the_parameters():
    gpipe = memory.estimate("resnet18", [5], 32, 64, schedule="gpipe", microbatches=8)
    one = memory.estimate("resnet18", [5], 32, 64, schedule="1f1b", microbatches=8)
    assert one[0].activations < 0.5 * gpipe[0].activations
    momentum = memory.estimate("resnet18", [5], 32, 64, schedule="1f1b", microbatches=8, optimizer="momentum")
    assert [d.optimizer for d in one] == [0, 0]
    assert [d.optimizer for d in momentum] == [d.gradients for d in momentum]


@pytest.mark.parametrize("form, schedule", [("per-device", "1f1b"), ("one-process", "gpipe")])
def test_the_planner_and_the_report_count_the_same_memory(form, schedule):
    blocks = footprints("resnet18", 64, classes=10)
    candidate = evaluate(Workload(blocks, {}, ranks=2, batch=64, form=form), schedule, 8, [5])
    options = {"form": form, "schedule": schedule, "microbatches": 8, "classes": 10}
    assert candidate.devices == memory.estimate("resnet18", [5], 64, 64, **options)


def test_footprints_count_every_parameter_once():
    with torch.device("meta"):
        whole = models.build("resnet50", classes=1000, channels=3, image_size=224)
    blocks = footprints("resnet50", 224)
    assert [block.name for block in blocks] == whole.names
    assert sum(block.parameters for block in blocks) == sum(p.numel() for p in whole.parameters())
    assert blocks[0].input == 3 * 224 * 224 * 4
    assert all(a.output == b.input for a, b in zip(blocks, blocks[1:], strict=False))


def test_footprints_hold_for_every_microbatch_size(monkeypatch):
    at_sixteen = [needs(block, 16) for block in footprints("resnet18", 64)]
    monkeypatch.setattr("mpdemo.plan.footprint.SIZES", (4, 16))
    monkeypatch.setattr("mpdemo.plan.footprint._footprints", _footprints.__wrapped__)  # without the cache
    again = [needs(block, 16) for block in footprints("resnet18", 64)]
    for one, other in zip(at_sixteen, again, strict=True):
        assert one == pytest.approx(other, rel=0.001, abs=8 * 512)  # the allocator's rounding


@pytest.mark.parametrize("wrong", [{"optimizer": "adagrad"}, {"form": "two-process"}, {"schedule": "1f1"}])
def test_unknown_words_are_refused(wrong):
    with pytest.raises(UserError, match="allowed: "):
        memory.estimate("resnet18", [5], 8, 64, **wrong)

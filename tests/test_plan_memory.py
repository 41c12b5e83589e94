"""What is counted of a step's memory: its parts, on real tensors; and the sum over blocks, which a split goes by."""

import gc

import pytest
import torch
from plans import of_the_course

from mpdemo.measure.compare import model_and_batch
from mpdemo.measure.trial import Trial
from mpdemo.predict.counting import LiveMemory, peak_of_a_step
from mpdemo.settings import Settings
from mpdemo.tools.plan import own
from mpdemo.tools.plan.request import PlanRequest
from mpdemo.tools.plan.roof import MIB
from mpdemo.world.env import World


def counted(**settings):
    """Return the parts of the peak of the course model's step on this machine's CPU."""
    given = Settings(rung="single", model="transformer", batch_size=64, **settings)
    trial = Trial(given, World(), *model_and_batch(given))
    (peak,) = peak_of_a_step(trial)
    return peak, sum(p.nbytes for p in trial.rung.model.parameters())


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 1), ("adamw", 2)])
def test_a_peak_is_divided_into_its_parts(optimizer, states):
    peak, weights = counted(optimizer=optimizer)
    assert peak.weights == weights and peak.optimizer == pytest.approx(states * weights, rel=0.001)
    assert peak.gradients < 0.01 * weights  # the backward pass has only begun, and a step begins with none
    assert peak.activations > 20 * MIB


def test_gradients_are_counted_where_they_are_at_the_peak():
    parts, weights = counted(microbatches=4)
    assert parts.gradients == weights  # those of the parts before
    assert parts.activations < 0.5 * counted()[0].activations


def test_a_plan_for_one_device_is_what_a_step_on_it_counts():
    gc.collect()
    model = of_the_course("transformer", 28, channels=1)
    planned = own.replicated(PlanRequest(model, 64, optimizer="adamw"), parts=(4,)).memory
    peak, _ = counted(optimizer="adamw", microbatches=4)
    assert planned == pytest.approx(sum(peak), rel=0.05)


def test_a_plan_leaves_nothing_behind():
    own.sharded(PlanRequest(of_the_course("convnet", 64), 8, devices=2))
    assert not torch.distributed.is_initialized() and gc.isenabled()


def test_memory_is_counted_inside_another_count_and_storages_are_resized_as_before():
    own = torch.UntypedStorage.__dict__.get("resize_")
    with LiveMemory() as outer:
        with LiveMemory() as inner:
            tensor = torch.zeros(1024)
            tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(8192)
    assert inner.peak() == 4096 and inner.live["cpu"] == 0 and outer.live["cpu"] == 8192
    assert torch.UntypedStorage.__dict__.get("resize_") is own

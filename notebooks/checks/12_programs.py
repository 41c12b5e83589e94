"""Tests of the programs in sitting 12: a validation, and a clock that waits for the device."""
# ruff: noqa: F821 - what the reader's program defines

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import close


class Stored:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor
        STORED.add(self)


STORED = weakref.WeakSet()  # what is no longer kept leaves it by itself


def test_12_2(rank, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
    images, labels, stored, modes = torch.randn(80, 16), torch.arange(80) % 10, [], []
    batches = list(zip(images.split(16), labels.split(16), strict=True))

    def note(*_):
        stored.append(len(STORED))
        modes.append(model.training)

    hook = model.register_forward_pre_hook(note)
    with torch.autograd.graph.saved_tensors_hooks(Stored, lambda kept: kept.tensor):
        result = validate(model, cross_entropy, batches)
    hook.remove()
    assert len(stored) == len(batches), (
        f"For {len(batches)} batches it called the model {len(stored)} times."
    )
    grown = f"Before the last of {len(batches)} batches it kept {stored[-1]} tensors for a backward pass"
    assert stored[-1] <= stored[1], f"{grown}, before the second {stored[1]}."
    assert not any(modes), "The dropout was on: another call gives another loss."
    assert model.training, (
        "The training would go on without dropout: the model is no longer in training mode."
    )
    wanted = cross_entropy(model.eval()(images), labels).item()
    assert close(float(result), wanted, 1e-4), (
        f"It returns {float(result):.4f}, but the mean loss is {wanted:.4f}."
    )
    return f"The loss is {float(result):.2f} in every call, and no batch leaves anything behind."


class ToyDevice:
    """A device that takes its work from a queue; `waits` has how much was launched each time that the host waited."""

    def __init__(self, seconds):
        self.seconds, self.launched, self.waits, self.last = seconds, 0, [], None
        self.queue = ThreadPoolExecutor(1)

    def launch(self, result=0.0):
        """Put work into the queue and return at once; ``item()`` of what is returned waits for `result`."""
        self.launched += 1
        self.last = self.queue.submit(lambda: time.sleep(self.seconds) or result)
        self.last.item = partial(self.item_of, self.last)
        return self.last

    def item_of(self, work):
        if not work.done():
            self.waits.append(self.launched)
        return work.result()

    def wait(self):
        """Wait until all work in the queue is done, as ``torch.cuda.synchronize()`` does."""
        if self.last:
            self.last.item()


def slow_batches(count):
    for number in range(count):
        time.sleep(0.002)  # the host loads a batch
        yield number


def test_12_3(rank, n):
    device, steps = ToyDevice(0.010), 20
    losses, seconds = measure(device, slow_batches(steps))
    assert losses == list(range(steps)), (
        f"The losses of {steps} steps should come back in order, but it gave {losses}."
    )
    early = [launched for launched in device.waits if launched < steps]
    assert len(early) <= steps // 5, (
        f"The host waited {len(early)} times before the last step: they take turns."
    )
    said = f"It reports {1000 * seconds:.1f} ms a step"
    late = "The clock was read before the device had done its work."
    assert seconds > 0.0097, f"{said}, but the device computes 10 ms for each. {late}"
    return f"{said} for a device that computes 10 ms: measured, not just launched."

"""Tests of the programs in notebook 01: a training loop, a clock that waits for the device, recomputed layers."""
# ruff: noqa: F821 - what the reader's program defines

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import close


def losses_of(loop):
    """Train a small network with a loop, on the same data in every call; return the losses, and whether it moved."""
    torch.manual_seed(0)
    model, images = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), torch.randn(1536, 16))
    labels = (images @ torch.randn(16, 10)).argmax(1)
    batches = list(zip(images.split(128), labels.split(128), strict=True)) * 6  # epochs
    before = model[0].weight.clone()
    losses = loop(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, batches)
    assert len(losses) == len(batches), f"For {len(batches)} batches it returned {len(losses)} losses."
    return [float(loss) for loss in losses], not torch.equal(before, model[0].weight)


def plain_loop(model, optimizer, loss_fn, batches, clear=True):
    losses = []
    for images, labels in batches:
        if clear:
            optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def test_01_2(rank, n):
    losses, moved = losses_of(train)
    wanted, never_cleared = losses_of(plain_loop)[0], losses_of(partial(plain_loop, clear=False))[0]
    steps = len(losses)
    assert moved, f"After {steps} steps no weight has moved: the optimizer finds no gradient."
    same = all(close(a, b, 1e-4) for a, b in zip(losses, never_cleared, strict=True))
    assert not same, f"In step {steps} the optimizer still follows the gradient of step 1, added to all the others."
    for step, (loss, right) in enumerate(zip(losses, wanted, strict=True), 1):
        assert close(loss, right, 1e-4), f"In step {step} the loss is {loss:.4f}, but a correct loop has {right:.4f}."
    return f"The loss is {losses[-1]:.2f} after {steps} steps; the broken loop had {never_cleared[-1]:.2f}."


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


def test_01_3(rank, n):
    device, steps = ToyDevice(0.010), 20
    losses, seconds = measure(device, slow_batches(steps))
    assert losses == list(range(steps)), f"The losses of {steps} steps should come back in order, but it gave {losses}."
    early = [launched for launched in device.waits if launched < steps]
    assert len(early) <= steps // 5, f"The host waited {len(early)} times before the last step: they take turns."
    said = f"It reports {1000 * seconds:.1f} ms a step"
    late = "The clock was read before the device had done its work."
    assert seconds > 0.0097, f"{said}, but the device computes 10 ms for each. {late}"
    return f"{said} for a device that computes 10 ms: measured, not just launched."


def test_01_4(rank, n):
    torch.manual_seed(0)
    layer, x, passes = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(4, 8), []
    own, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = layer(plain)
    wanted.sin().sum().backward()
    right = [plain.grad, *(weight.grad for weight in layer.parameters())]
    layer.zero_grad()
    layer.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    output = Recompute.apply(layer, own)
    assert isinstance(output, torch.Tensor), f"Recompute.apply returns {output!r}, not the layer's output."
    assert torch.equal(output, wanted), "It doesn't return what the layer returns."
    assert passes == [False], "In forward the layer was called with a graph, which keeps its activations."
    output.sin().sum().backward()
    assert len(passes) == 2, f"The backward pass computed the layer {len(passes) - 1} times, not once more."
    gradients = [own.grad, *(weight.grad for weight in layer.parameters())]
    assert gradients[0] is not None, "x gets no gradient, so the layers before this one don't learn."
    assert all(gradient is not None for gradient in gradients), "The layer's weights get no gradient."
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, right, strict=True))
    assert same, "The gradients aren't those of a plain call: the gradient that comes from above must go in."

"""Tests of the programs in notebook 04: moves between devices, messages between stages, the same images everywhere."""
# ruff: noqa: F821 - what the reader's program defines

from contextlib import nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

from checks.helpers import MISSING, close, gathered, gradients, ratio, watch


def require_gradients(names, own, right, rank=0):
    """Require the gradients of a stage to be those that one process computes."""
    for name, gradient, wanted in zip(names, own, right, strict=True):
        times, whose = ratio([gradient], [wanted]), f"the gradient of {name} on rank {rank}"
        assert times != MISSING, f"There is none: {whose} is still None after the step."
        assert times is not None, f"The step ends, but {whose} points in another direction than in one process."
        assert close(times, 1, 1e-3), f"The step ends, but {whose} is {times:.2f} times the right one."


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def call_on(devices, mode):
    """Call the reader's `train_step` with two stages on two devices."""
    torch.manual_seed(0)
    with mode:
        stages = nn.Linear(6, 4, device=devices[0]), nn.Linear(4, 3, device=devices[1])
        batch = (torch.randn(8, 6, device=devices[0]), torch.zeros(8, dtype=torch.long, device=devices[0]))
        return stages, batch, train_step(*stages, [torch.device(device) for device in devices], *batch)


def test_04_1(rank, n):
    try:
        stages, _, loss = call_on(("cpu:0", "cpu:1"), FakeTensorMode())  # two devices, without any memory
    except RuntimeError as error:
        said = str(error).splitlines()[0].rstrip(".!")
        raise AssertionError(f"On two different devices PyTorch refuses the step: {said}.") from None
    for name, stage, device in zip(("first", "second"), stages, ("cpu:0", "cpu:1"), strict=True):
        assert str(stage.weight.device) == device, f"Now the weights of the {name} stage are on the other device."
    assert isinstance(loss, torch.Tensor), "It returns no loss."
    assert str(loss.device) == "cpu:1", "It runs, and the loss is on device 0: so the outputs were sent back there."
    (first, second), (images, labels), _ = call_on(("cpu", "cpu"), nullcontext())
    own = gradients(first) + gradients(second)
    cross_entropy(second(first(images).relu()), labels).backward()
    names = [f"{stage}.{name}" for stage in ("first", "second") for name in ("weight", "bias")]
    require_gradients(names, own, gradients(first) + gradients(second))


def test_04_3(rank, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    images, labels = torch.randn(8, 6), torch.randint(0, 3, (8,))
    right_loss = cross_entropy(model(images), labels)
    right_loss.backward()
    right = gradients(model)
    stage, right = (model[:2], right[:2]) if rank == 0 else (model[2:], right[2:])
    sends = watch(program, "send", "isend")
    loss = train_step(stage, images if rank == 0 else None, labels if rank == 1 else None, rank)
    sent = [shape for _, shape in sends]
    assert sent, f"Rank {rank} sends nothing."
    what = ("activations (8, 4)", "gradient of the activations (8, 4)")[rank]
    assert sent[0] == [8, 4], f"Rank {rank} sends a tensor of shape {sent[0]}, and not the {what}."
    assert len(sent) == 1, f"In one step rank {rank} sends {len(sent)} tensors. One is enough."
    assert rank == 0 or isinstance(loss, torch.Tensor), "Rank 1 returns no loss."
    require_gradients(names_of(stage), gradients(stage), right, rank)
    near = rank == 0 or close(loss.item(), right_loss.item(), 1e-4)
    assert near, f"The gradients are right, but rank 1 returns the loss {loss:.3f}."


class Loss(nn.Module):
    """The last layer of a stage that computes the loss."""

    def forward(self, outputs):
        return outputs.square().mean()


def test_04_4(rank, n):
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model, images = (nn.Sequential(first, second, nn.Sequential(nn.Linear(4, 3), Loss())), torch.randn(8, 6))
    model(images).backward()
    right = gradients(model[rank])
    train_step(model[rank], images if rank == 0 else None, rank, n)
    require_gradients(names_of(model[rank]), gradients(model[rank]), right, rank)


def test_04_5(rank, n):
    """The ranks' random states differ, as they do for stages whose dropout draws other numbers from them."""
    torch.manual_seed(100 + rank)
    batches, own = loader(list(range(12)), 4, rank, n), []  # the 12 images are their own numbers
    for _ in range(2):
        torch.rand(1 + rank)
        own += [[int(image) for image in batch] for batch in batches]
    first, second = gathered(own)
    assert len(first) == len(second), f"Rank 0 makes {len(first)} steps and rank 1 makes {len(second)}: one waits."
    for step, (images, labels) in enumerate(zip(first, second, strict=True)):
        problem = f"In step {step} rank 0 computes on the images {images}, and rank 1 has the labels of {labels}."
        assert images == labels, problem
    size = min(map(len, first))
    few = f"With batch_size=4 a step has {size} images: here the ranks don't split the batch."
    assert {len(batch) for batch in first} == {4}, few
    assert sorted(sum(first[:3], [])) == list(range(12)), "An epoch doesn't hold each of the 12 images once."
    assert first[0] != [0, 1, 2, 3], "The images are in their original order: not shuffled."
    again = "The second epoch has the order of the first: `set_epoch` is never called on this loader."
    assert first[:3] != first[3:], again

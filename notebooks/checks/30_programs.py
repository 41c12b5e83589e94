"""Tests of the programs in notebook 30: messages between stages, one batch for both."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from checks.helpers import close, gathered, gradients, ratio, require_each, watch


class Down(nn.Module):
    """The first half of a U-Net: returns the deep activations and the skip connection."""

    def __init__(self):
        super().__init__()
        self.first, self.deep = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3, stride=2)

    def forward(self, images):
        skip = self.first(images).relu()
        return self.deep(skip), skip


class Up(nn.Module):
    """The second half of a U-Net, with outputs for classes."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, deep, skip):
        both = torch.cat([interpolate(deep, skip.shape[-2:]), skip], dim=1)
        return self.last(both.square().mean((2, 3)))


def test_30_1(rank, n):
    torch.manual_seed(0)
    down, up = halves = Down(), Up()
    stage, pickled = (
        halves[rank],
        watch(program, "send_object_list", "broadcast_object_list", "all_gather_object"),
    )
    for shape in ((8, 1, 12, 12), (5, 1, 9, 16)):
        images, labels = torch.randn(shape), torch.randint(0, 3, shape[:1])
        deep, skip = down(images)
        right_loss = cross_entropy(up(deep, skip), labels)
        right_loss.backward()
        right = [gradients(half) for half in halves][rank]
        cross_entropy(up(down(images)[0], skip.detach()), labels).backward()
        without_skip = [gradients(half) for half in halves][rank]
        passes = []
        with down.first.weight.register_hook(passes.append):
            loss = train_step(stage, images if rank == 0 else None, labels if rank == 1 else None, rank)
        assert rank == 0 or isinstance(loss, torch.Tensor), "Rank 1 returns no loss."
        own = gradients(stage)
        lost = "The step ends, but the skip connection's gradient never reaches rank 0's layers."
        assert rank == 1 or not close(ratio(own, without_skip), 1, 1e-3), lost
        require_each(stage, own, right, rank)
        twice = "The gradients are right, but rank 0 goes back through a layer twice. Start once, from both tensors."
        assert len(passes) < 2, twice
        near = rank == 0 or close(loss.item(), right_loss.item(), 1e-4)
        assert near, f"The gradients are right, but rank 1 returns the loss {loss:.3f}."
        slow = f"The gradients are right, but {pickled and pickled[0][0]} pickles every tensor, which on a GPU copies"
        assert not pickled, (
            f"{slow} it to the CPU and makes Python wait. Send the shapes, then plain tensors."
        )


def test_30_2(rank, n):
    """The ranks' random states differ, as they do for stages whose dropout draws other numbers from them."""
    torch.manual_seed(100 + rank)
    batches, own = loader(list(range(12)), 4, rank, n), []  # the 12 images are their own numbers
    for _ in range(2):
        torch.rand(1 + rank)
        own += [[int(image) for image in batch] for batch in batches]
    first, second = gathered(own)
    everything = sorted(sum(first[: len(first) // 2], [])) == [*range(12)]
    why = (
        "each loader shuffles by random numbers of its own"
        if everything
        else "a sampler deals the images out"
    )
    for step, (images, labels) in enumerate(zip(first, second, strict=True)):
        apart = (
            f"In step {step} rank 0 has the images {images} and rank 1 has the labels of {labels}: {why}."
        )
        assert images == labels, apart
    sizes = [len(batch) for batch in first]
    assert sizes == 6 * [4], f"With batch_size=4 the steps of two epochs have {sizes} images."
    assert first[0] != [0, 1, 2, 3], "The images are in their original order: not shuffled."
    assert first[:3] != first[3:], (
        "The second epoch has the order of the first: `set_epoch` is never called."
    )

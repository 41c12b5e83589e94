"""Tests of the programs in notebook 04: messages between stages, recomputation, the same images, one checkpoint."""
# ruff: noqa: F821 - what the reader's program defines

import os
import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, interpolate

from checks.helpers import close, gathered, gradients, ratio, slow_saves, substitute, watch


def require_each(stage, own, right, rank):
    """Require each gradient of a stage to be the one that one process computes."""
    for (name, _), gradient, wanted in zip(stage.named_parameters(), own, right, strict=True):
        times, whose = ratio([gradient], [wanted]), f"the gradient of {name} on rank {rank}"
        assert gradient is not None, f"There is none: {whose} is still None after the step."
        assert close(times, 1, 1e-3), (
            f"The step ends, but {whose} isn't one process's (times: {times:.2f})."
        )


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


def test_04_1(rank, n):
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


class Loss(nn.Module):
    """The last layer of a stage that computes the loss."""

    def forward(self, outputs):
        return outputs.square().mean()


def test_04_2(rank, n):
    substitute(program, torch.utils.checkpoint, "checkpoint", ready_made)
    passes = []  # of the last stage, forward
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        hidden = [nn.Sequential(nn.Linear(k, 4), nn.Dropout(dropout), nn.Tanh()) for k in (6, 4)]
        model, images = [*hidden, nn.Sequential(nn.Linear(4, 3), Loss())], torch.randn(8, 6)
        x = images
        for number, stage in enumerate(model):  # each rank draws its own masks
            torch.manual_seed(100 + number)
            x = stage(x)
        x.backward()
        right = [gradients(stage) for stage in model][rank]
        torch.manual_seed(100 + rank)
        model[-1].register_forward_hook(lambda *_: passes.append(1))
        with holding(program) as held:
            train_step(model[rank], images if rank == 0 else None, rank, n)
        waiting = (
            f"While rank {rank} waits for the gradient, autograd still holds {max(held, default=0)} tensors"
        )
        assert rank == n - 1 or not any(held), f"{waiting} of its forward pass."
        own = gradients(model[rank])
        other = f"Only with dropout rank {rank}'s gradients are wrong: which mask did each pass draw?"
        assert not dropout or None in own or close(ratio(own, right), 1, 1e-3), other
        require_each(model[rank], own, right, rank)
    twice = "The gradients are right, but the last stage recomputes, too. It waits for nothing, so it saves no memory."
    assert len(passes) < 3, twice


def ready_made(*args, **kwargs):
    raise AssertionError(
        "torch.utils.checkpoint does this for you. Write it once yourself, to know what it does."
    )


@contextmanager
def holding(program):
    """Yield a list of how many tensors autograd holds whenever the reader's program begins to receive."""
    held, counts, receives = weakref.WeakSet(), [], (dist.recv, dist.irecv)

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor
            held.add(self)

    def counted(receive):
        return lambda *args, **kwargs: (counts.append(len(held)), receive(*args, **kwargs))[1]

    for receive in receives:
        substitute(program, dist, receive.__name__, counted(receive))
    with saved_tensors_hooks(Held, lambda kept: kept.tensor):
        yield counts
    for receive in receives:
        substitute(program, dist, receive.__name__, receive)


def test_04_3(rank, n):
    """The ranks' random states differ, as they do for stages whose dropout draws other numbers from them."""
    torch.manual_seed(100 + rank)
    batches, own = loader(list(range(12)), 4, rank, n), []  # the 12 images are their own numbers
    for _ in range(2):
        torch.rand(1 + rank)
        own += [[int(image) for image in batch] for batch in batches]
    first, second = gathered(own)
    for step, (images, labels) in enumerate(zip(first, second, strict=True)):
        assert images == labels, (
            f"In step {step} rank 0 has the images {images} and rank 1 has the labels of {labels}."
        )
    sizes = [len(batch) for batch in first]
    assert sizes == 6 * [4], f"With batch_size=4 the steps of two epochs have {sizes} images."
    assert first[0] != [0, 1, 2, 3], "The images are in their original order: not shuffled."
    assert first[:3] != first[3:], (
        "The second epoch has the order of the first: `set_epoch` is never called."
    )


def test_04_4(rank, n):
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), str(folder / "model.pt")
    with slow_saves() as saved:
        save((model[:2], model[2:])[rank], path, rank, n)
        there = os.path.exists(path)
        wait_for_all()
    counts = [len(files) for files in gathered(saved)]
    assert sum(counts) == 1, (
        f"Rank 0 writes {counts[0]} files and rank 1 writes {counts[1]}; the last one would win."
    )
    file = torch.load(path)
    missing = sorted(set(model.state_dict()) - set(file))
    assert not missing, f"There is one file, but it lacks {', '.join(missing)}: another stage's weights."
    assert all(torch.equal(file[name], value) for name, value in model.state_dict().items()), (
        "The weights differ."
    )
    assert there, f"Rank {rank} continued before the file was there. If it loads it now, it fails."

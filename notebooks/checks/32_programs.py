"""Tests of the programs in notebook 32: 1F1B that doesn't hang, a matrix in two stages, one norm, recomputation."""
# ruff: noqa: F821 - what the reader's program defines

import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from checks.helpers import (
    MICROBATCHES,
    close,
    gathered,
    gradients,
    ratio,
    ready_made,
    require_each,
    require_stages,
    substitute,
    watch,
)


def test_32_1(rank, n):
    calls = watch(program, "send", "recv", "isend", "irecv", "batch_isend_irecv")
    require_stages(rank, lambda stage, labels: last_stage(stage, labels, MICROBATCHES), ahead=2)
    assert "batch" not in str(calls), (
        "On NCCL rank 1's batch never meets rank 0's single calls: a batch takes another communicator, unless the "
        "process group was made with device_id."
    )
    names = gathered([name.removeprefix("i") for name, _ in calls])
    for number, (first, last) in enumerate(zip(*names, strict=False), 1):
        assert first != last, f"It works on gloo. On NCCL both ranks would wait in call {number}, a {last}."


def test_32_2(rank, n):
    """A model of three stages: a matrix embeds the tokens in the first, and computes the logits in the last."""
    group = dist.new_group([0, n - 1])
    if rank not in (0, n - 1):
        return
    torch.manual_seed(0)
    matrix, middle = torch.randn(7, 4), nn.Linear(4, 4)
    uses = [matrix.clone().requires_grad_() for _ in range(2)]
    tokens, targets = torch.randint(0, 7, (12,)), torch.randint(0, 7, (12,))
    cross_entropy(middle(uses[0][tokens]) @ uses[1].T, targets).backward()
    weight = nn.Parameter(matrix.clone())
    weight.grad = uses[rank > 0].grad.clone()
    step(torch.optim.SGD([weight], lr=0.5), weight, group)
    moved, first, second = (matrix - weight.data) / 0.5, uses[0].grad, uses[1].grad
    where = f"The copy of rank {rank} moves by"
    for what, gradient in {
        "the gradient of the first stage alone": first,
        "the gradient of the last stage alone": second,
        "half of the gradient: both uses count in full, so it is a sum and no mean": (first + second) / 2,
    }.items():
        assert not torch.allclose(moved, gradient, atol=1e-5), f"{where} {what}."
    told = f"{where} something else than a single device's gradient."
    assert torch.allclose(moved, first + second, atol=1e-5), told


def test_32_3(rank, n):
    """The gradients of the two stages have the norms 3 and 4, that of a matrix which both have 12: 5 or 13 in all."""
    weight, tied = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    for limit, factor in ((1.0, 0.2), (10.0, 1.0)):
        weight.grad = torch.tensor([(3.0, 4.0)[rank]])
        norm = float(clip([weight], limit, []))
        assert close(norm, 5, 0.001), f"Rank {rank} returns the norm {norm:.2f}; 3 and 4 together have 5."
        times = weight.grad.item() / (3.0, 4.0)[rank]
        told = f"With a limit of {limit:g}, rank {rank} multiplies its gradient by {times:.2f}, not by {factor:g}."
        assert close(times, factor, 0.001), told
    weight.grad, tied.grad = torch.tensor([(3.0, 4.0)[rank]]), torch.tensor([12.0])
    norm = float(clip([weight, tied], 1.3, [tied] if rank else []))
    twice = f"The norm is {norm:.2f}: the tied matrix counts on both stages. "
    twice += "A single device has it once, and the norm 13."
    assert not close(norm, 313**0.5, 0.001), twice
    assert close(norm, 13, 0.001), (
        f"With a tied matrix, rank {rank} returns the norm {norm:.2f}; 3, 4 and 12 have 13."
    )
    times = tied.grad.item() / 12
    told = f"Rank {rank} multiplies the tied matrix's gradient by {times:.2f}, not by 0.1 like the others."
    assert close(tied.grad.item(), 1.2, 0.001), told


class Loss(nn.Module):
    """The last layer of a stage that computes the loss."""

    def forward(self, outputs):
        return outputs.square().mean()


def test_32_4(rank, n):
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

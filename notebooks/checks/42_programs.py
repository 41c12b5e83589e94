"""Tests of the programs in sitting 42: accumulation with FSDP, a loss weighted by tokens, shards over nodes."""
# ruff: noqa: F821 - what the reader's program defines

import math
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from checks.helpers import (
    close,
    gathered,
    gradients,
    ratio,
    require_gradients,
    substitute,
    watch,
)
from mpdemo.world.collectives import whole


def blocks_and_batch():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]), torch.randn(8, 4)


def require_sharded(model):
    """Require each block to be sharded, and the model itself."""
    blocks = [isinstance(block, FSDPModule) for block in model]
    assert any(blocks) or isinstance(model, FSDPModule), (
        "Nothing is sharded: every rank still has the whole model."
    )
    assert all(blocks), (
        "The blocks are gathered all at once, so each rank holds the whole model in every step."
    )
    alone = "Each block is a root of its own, and by default a root keeps its gathered weights after the forward pass."
    assert isinstance(model, FSDPModule), alone


def used(model, optimizer, *args):
    """Return what a step returns and the gradients it has used: what SGD subtracts from the weights, over the rate."""
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    said = train_step(model, optimizer, *args)
    optimizer.zero_grad()
    after = [whole(parameter.detach()) for parameter in model.parameters()]
    return said, [
        (old - new) / optimizer.param_groups[0]["lr"] for old, new in zip(before, after, strict=True)
    ]


def gradients_of(model, x, y):
    """Return the gradients of the mean squared error."""
    return [*torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))]


def test_42_1(rank, n):
    model, x = blocks_and_batch()
    single, y = deepcopy(model), torch.tensor([1.0, -1.0]).repeat_interleave(4)[:, None].expand(8, 4)
    parts = [*zip(x.chunk(n)[rank].chunk(2), y.chunk(n)[rank].chunk(2), strict=True)]
    right = gradients_of(single, x, y)
    firsts = [tensor.unflatten(0, (n, 2, -1))[:, 0].flatten(0, 1) for tensor in (x, y)]  # of each rank
    optimizer = prepare(model, init_device_mesh("cpu", (n,)))
    _, own = used(model, optimizer, parts, 1000.0)
    still = "After a step some weights haven't changed: does the optimizer hold the model's tensors of now?"
    assert all(gradient.any() for gradient in own), still
    require_sharded(model)
    first = ratio(own, gradients_of(single, *firsts))
    assert math.isnan(first), (
        "The step uses the first microbatch's gradients only: who reduce-scatters the others'?"
    )
    require_gradients(own, right, "Of two microbatches")
    single.load_state_dict({name: whole(value.detach()) for name, value in model.named_parameters()})
    limit = 0.1
    (_, own), right = used(model, optimizer, parts, limit), gradients_of(single, x, y)
    norm = torch.cat([gradient.flatten() for gradient in own]).norm().item()
    assert close(norm, limit), (
        f"Clipped to {limit}, all gradients together have the norm {norm:.3f}: of what is it?"
    )
    times = limit / torch.cat([gradient.flatten() for gradient in right]).norm()
    require_gradients(own, [times * gradient for gradient in right], "After clipping")


# of each rank's two microbatches, which have 8 places; the rest is padding
TARGETS = torch.tensor([[7, 1], [2, 3]])
UNEQUAL = {  # what a microbatch's losses count, times any number
    "a mean of the microbatches' means: one target among 7 counts less than a lone one": 1 / TARGETS,
    "a mean of the ranks' means: a target of rank 0, which has 8, counts less than one of rank 1, which has 5": (
        1 / TARGETS.sum(1, keepdim=True)
    ),
    "of the last microbatch only": torch.tensor([0, 1]),
}
FACTORS = {  # how many times one device's gradients
    1 / 2: "both libraries average the gradients over the ranks",
    13 / 32: "padding is counted",
    13 / 4: "only the last microbatch's targets are counted",
    13 / 2: "they are never divided by the number of targets",
    13: "they are never divided by the number of targets",
}


class Once:
    """An iterator, used up after one pass as a generator is, that says so when a second pass begins."""

    def __init__(self, parts):
        self.parts, self.over = iter(parts), False

    def __iter__(self):
        told = "microbatches is a generator, and a first loop has used it up: the second one gets no microbatch."
        assert not self.over, told
        return self

    def __next__(self):
        try:
            return next(self.parts)
        except StopIteration:
            self.over = True
            raise


def require_no_shard(function):
    """Let a collective refuse a DTensor in words."""

    def checked(tensor, *args, **kwargs):
        told = "all_reduce got a DTensor, a shard of a gradient: fully_shard has already averaged it over the ranks."
        assert not isinstance(tensor, DTensor), told
        return function(tensor, *args, **kwargs)

    return checked


def test_42_2(rank, n):
    substitute(program, dist, "all_reduce", require_no_shard(dist.all_reduce))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    tokens, targets = torch.randint(0, 5, (2, n, 2, 2, 4))
    for count, row in zip(TARGETS.flatten().tolist(), targets.view(2 * n, -1), strict=True):
        row[count:] = -100
    losses = cross_entropy(model(tokens).movedim(-1, 1), targets, reduction="none").sum((-1, -2))
    one, here = (losses.sum() / 13).item(), (losses[rank].sum() / TARGETS[rank].sum()).item()
    for name, wrap in {"fully_shard": shard_all, "DDP": DistributedDataParallel}.items():
        wrapped = wrap(deepcopy(model))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        loss, own = used(wrapped, optimizer, Once(zip(tokens[rank], targets[rank], strict=True)))
        assert any(gradient.any() for gradient in own), f"With {name} no weight has changed after the step."
        require_weighted(own, model, losses, name)
        told = f"With {name} rank {rank} returns the loss {float(loss):.3f}; one device's is {one:.3f}."
        told += " It's the mean of this rank's own targets." * close(float(loss), here)
        assert close(float(loss), one, 1e-4), told


def require_weighted(own, model, losses, name):
    """Require the gradients of the mean over all targets; `losses` are the sums of each rank's microbatches."""

    def gradients_of(weights):
        return torch.autograd.grad((losses * weights).sum(), [*model.parameters()], retain_graph=True)

    for kind, weights in UNEQUAL.items():
        assert math.isnan(ratio(own, gradients_of(weights))), f"With {name} the gradient is {kind}."
    right = gradients_of(1 / 13)
    halves = [
        ratio(*([g.chunk(2)[half] for g in gradients] for gradients in (own, right))) for half in (0, 1)
    ]
    told = f"With {name} each rank scales its own rows by another number: do all ranks divide by the same?"
    assert not math.isnan(times := ratio(own, right)) or any(map(math.isnan, halves)), told
    why = next((why for factor, why in FACTORS.items() if close(times, factor)), "")
    assert not why, f"With {name} the gradients are {times:.2f} times one device's: {why}."
    require_gradients(own, right, f"With {name}")


def shard_all(model):
    """Shard each layer, then the model."""
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model


def test_42_3(rank, n):
    model, x = blocks_and_batch()
    single, y = deepcopy(model), torch.tensor([1.0, -1.0]).repeat_interleave(4)[:, None].expand(8, 4)
    prepare(model, 2, 2)
    require_sharded(model)
    rows = gathered(model[0][0].weight.to_local().detach().tolist())
    assert len(rows[0]) != 1, (
        "Each rank stores a quarter, so every block's weights are gathered across the network."
    )
    same = [other for other in range(n) if rows[other] == rows[0]]
    assert same != [0, 1], (
        "Ranks 0 and 1 store the same rows, but they share a node: here it should store them once."
    )
    assert same == [0, 2], (
        f"Rank 0's rows are stored by the ranks {same}, not by ranks 0 and 2, one in each node."
    )
    parts = [*zip(x.chunk(n)[rank].chunk(2), y.chunk(n)[rank].chunk(2), strict=True)]
    for step in ("In the first step", "In the second step"):
        calls = watch(program, "all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
        accumulate(model, parts)
        require_gradients([g.full_tensor() for g in gradients(model)], gradients_of(single, x, y), step)
        across, inside = (
            sum(name == kind for name, _ in calls) for kind in ("all_reduce", "reduce_scatter")
        )
        kept = (
            f"{step} 3 blocks and 2 microbatches make {inside} reduce-scatters, not 6: until the last one, "
        )
        assert inside >= 6, f"{kept}each rank keeps whole gradients."
        assert across == 3, (
            f"{step} {across} all-reduces cross the network; one for each of 3 blocks is enough."
        )

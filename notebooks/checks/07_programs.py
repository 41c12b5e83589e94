"""Tests of the programs in notebook 07: FSDP by hand, with the library, with adapters, over nodes."""
# ruff: noqa: F821 - what the reader's program defines

from copy import deepcopy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from checks.helpers import COLLECTIVES, gathered, require_gradients, watch
from mpdemo.world.collectives import whole


def test_07_1(rank, n):
    torch.manual_seed(0)
    weight, images, targets = torch.randn(6, 4), torch.randn(8, 4), torch.randn(8, 6)
    full = weight.clone().requires_grad_()
    ((images @ full.T - targets) ** 2).mean().backward()
    calls = watch(program, *COLLECTIVES)
    own = gradient(weight.chunk(n)[rank].clone(), images.chunk(n)[rank], targets.chunk(n)[rank], n)
    used, where, shape = {name for name, _ in calls}, f"On rank {rank}", tuple(own.shape)
    assert "all_gather" in used, f"{where} the weight is never gathered from all ranks."
    assert shape != (6, 4), f"{where} the whole gradient is returned, but a rank keeps only its own rows."
    assert shape == (3, 4), f"{where} the gradient has the shape {shape}, but the rows have (3, 4)."
    require_gradients([own], [full.grad.chunk(n)[rank]], where, "Whose images, and which rows, are in it?")
    assert "all_reduce" not in used, f"{where} an all-reduce brings all rows, to keep some: use reduce-scatter."


def blocks_and_batch():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]), torch.randn(8, 4)


def require_sharded(model):
    """Require each block to be sharded, and the model itself."""
    blocks = [isinstance(block, FSDPModule) for block in model]
    assert any(blocks) or isinstance(model, FSDPModule), "Nothing is sharded: every rank still has the whole model."
    assert all(blocks), "The blocks are gathered all at once, so each rank holds the whole model in every step."
    alone = "Each block is a root of its own, and by default a root keeps its gathered weights after the forward pass."
    assert isinstance(model, FSDPModule), alone


def require_step(model, optimizer, loss):
    """Require a step to change every weight."""
    loss.backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    moved = [not torch.equal(*map(whole, pair)) for pair in zip(before, model.parameters(), strict=True)]
    assert all(moved), "After a step some weights haven't changed: does the optimizer hold the model's tensors of now?"


def test_07_2(rank, n):
    model, x = blocks_and_batch()
    optimizer = prepare(model, init_device_mesh("cpu", (n,)))
    require_step(model, optimizer, (model(x) ** 2).mean())
    require_sharded(model)


def test_07_3(rank, n):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    single = deepcopy(model).requires_grad_(False)
    torch.manual_seed(1)
    for layer in single:
        add_adapter(layer)
    first = {name: value.detach().clone() for name, value in single.named_parameters()}
    train(single, torch.optim.SGD([p for p in single.parameters() if p.requires_grad], lr=0.1), x)
    torch.manual_seed(1)
    train(model, prepare(model, init_device_mesh("cpu", (n,))), x.chunk(n)[rank])
    own = {name: whole(value.detach()) for name, value in model.named_parameters()}
    assert own.keys() == first.keys(), f"The model has the parameters {', '.join(own)}; expected: {', '.join(first)}."
    adapters = [name for name in own if name.endswith((".a", ".b"))]
    moved = [name for name in own if name not in adapters and not torch.equal(own[name], first[name])]
    assert not moved, f"A weight of the frozen model has changed: {moved[0]}."
    still = all(torch.equal(own[name], first[name]) for name in adapters)
    assert not still, "The adapters haven't changed: does the optimizer hold the model's tensors of now?"
    other = gathered([own[name].tolist() for name in adapters])
    apart = "Rank 0's adapters differ from rank 1's after three steps: nothing averages their gradients."
    assert other[0] == other[1], apart
    right = dict(single.named_parameters())
    close_enough = all(torch.allclose(own[name], right[name], atol=1e-5) for name in adapters)
    assert close_enough, "After three steps, the adapters aren't a single device's."
    assert isinstance(model, FSDPModule), "Nothing is sharded: every rank still has the whole model."


def train(model, optimizer, x):
    """Do three steps."""
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_07_4(rank, n):
    model, x = blocks_and_batch()
    right = [*torch.autograd.grad((model(x) ** 2).mean(), list(model.parameters()))]
    prepare(model, 2, 2)
    require_sharded(model)
    rows = gathered(model[0][0].weight.to_local().detach().tolist())
    assert len(rows[0]) != 1, "Each rank stores a quarter, so every block's weights are gathered across the network."
    same = [other for other in range(n) if rows[other] == rows[0]]
    assert same != [0, 1], "Ranks 0 and 1 store the same rows, but they share a node: here it should store them once."
    assert same == [0, 2], f"Rank 0's rows are stored by the ranks {same}, not by ranks 0 and 2, one in each node."
    (model(x.chunk(n)[rank]) ** 2).mean().backward()
    require_gradients([parameter.grad.full_tensor() for parameter in model.parameters()], right, f"On rank {rank}")

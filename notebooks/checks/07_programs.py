"""Tests of the programs in notebook 07: FSDP by hand, with the library, with adapters, over nodes."""
# ruff: noqa: F821 - what the reader's program defines

import math
from copy import deepcopy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from checks.helpers import COLLECTIVES, close, gathered, gradients, ratio, require_gradients, watch
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


def used(model, optimizer, *args):
    """Return the gradients that a step with SGD has used: what it subtracts from the weights, over the rate."""
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    train_step(model, optimizer, *args)
    optimizer.zero_grad()
    after = [whole(parameter.detach()) for parameter in model.parameters()]
    return [(old - new) / optimizer.param_groups[0]["lr"] for old, new in zip(before, after, strict=True)]


def gradients_of(model, x, y):
    """Return the gradients of the mean squared error."""
    return [*torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))]


def test_07_2(rank, n):
    model, x = blocks_and_batch()
    single, y = deepcopy(model), torch.tensor([1.0, -1.0]).repeat_interleave(4)[:, None].expand(8, 4)
    parts = [*zip(x.chunk(n)[rank].chunk(2), y.chunk(n)[rank].chunk(2), strict=True)]
    right = gradients_of(single, x, y)
    firsts = [tensor.unflatten(0, (n, 2, -1))[:, 0].flatten(0, 1) for tensor in (x, y)]  # of each rank
    optimizer = prepare(model, init_device_mesh("cpu", (n,)))
    own = used(model, optimizer, parts, 1000.0)
    still = "After a step some weights haven't changed: does the optimizer hold the model's tensors of now?"
    assert all(gradient.any() for gradient in own), still
    require_sharded(model)
    first = ratio(own, gradients_of(single, *firsts))
    assert math.isnan(first), "The step uses the first microbatch's gradients only: who reduce-scatters the others'?"
    require_gradients(own, right, "Of two microbatches")
    single.load_state_dict({name: whole(value.detach()) for name, value in model.named_parameters()})
    limit = 0.1
    own, right = used(model, optimizer, parts, limit), gradients_of(single, x, y)
    norm = torch.cat([gradient.flatten() for gradient in own]).norm().item()
    assert close(norm, limit), f"Clipped to {limit}, all gradients together have the norm {norm:.3f}: of what is it?"
    times = limit / torch.cat([gradient.flatten() for gradient in right]).norm()
    require_gradients(own, [times * gradient for gradient in right], "After clipping")


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
    single, y = deepcopy(model), torch.tensor([1.0, -1.0]).repeat_interleave(4)[:, None].expand(8, 4)
    prepare(model, 2, 2)
    require_sharded(model)
    rows = gathered(model[0][0].weight.to_local().detach().tolist())
    assert len(rows[0]) != 1, "Each rank stores a quarter, so every block's weights are gathered across the network."
    same = [other for other in range(n) if rows[other] == rows[0]]
    assert same != [0, 1], "Ranks 0 and 1 store the same rows, but they share a node: here it should store them once."
    assert same == [0, 2], f"Rank 0's rows are stored by the ranks {same}, not by ranks 0 and 2, one in each node."
    parts = [*zip(x.chunk(n)[rank].chunk(2), y.chunk(n)[rank].chunk(2), strict=True)]
    for step in ("In the first step", "In the second step"):
        calls = watch(program, "all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
        accumulate(model, parts)
        require_gradients([g.full_tensor() for g in gradients(model)], gradients_of(single, x, y), step)
        across, inside = (sum(name == kind for name, _ in calls) for kind in ("all_reduce", "reduce_scatter"))
        kept = f"{step} 3 blocks and 2 microbatches make {inside} reduce-scatters, not 6: until the last one, "
        assert inside >= 6, f"{kept}each rank keeps whole gradients."
        assert across == 3, f"{step} {across} all-reduces cross the network; one for each of 3 blocks is enough."

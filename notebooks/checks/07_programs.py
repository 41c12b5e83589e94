"""Tests of the programs in notebook 07: an all-reduce in halves; FSDP by hand, in bf16, over nodes; a split layer."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

from checks.helpers import COLLECTIVES, close, gathered, ratio, require_gradients, watch
from mpdemo.world.collectives import whole


def test_07_1(rank, n):
    halves = {"reduce_scatter", "all_gather"}
    tensor, calls = torch.arange(1.0, 2 * n + 1) * 10**rank, watch(program, *COLLECTIVES)
    all_reduce(tensor, n)
    used, value = {name for name, _ in calls}, [round(number) for number in tensor.tolist()]
    assert used <= halves, f"Rank {rank} calls {', '.join(used - halves)}: use reduce_scatter and all_gather."
    numbers, where = range(1, 2 * n + 1), f"On rank {rank} the tensor is {value}"
    assert value != [number * 37 for number in numbers], f"{where}: this is the mean, but an all-reduce adds up."
    right = value == [number * 111 for number in numbers]
    assert right, f"{where}, which isn't the sum over all ranks; the result must go into the tensor itself."
    assert used == halves, f"It is the sum, but rank {rank} doesn't call {' and '.join(halves - used)}."


def test_07_2(rank, n):
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


def test_07_3(rank, n):
    model, x = blocks_and_batch()
    optimizer = prepare(model, init_device_mesh("cpu", (n,)))
    require_step(model, optimizer, (model(x) ** 2).mean())
    require_sharded(model)


def test_07_4(rank, n):
    model, x = blocks_and_batch()
    computed = []
    for block in model:
        block[0].register_forward_pre_hook(lambda layer, _: computed.append(layer.weight.dtype))
    optimizer = prepare(model, init_device_mesh("cpu", (n,)))
    kept = "The weights are stored in bf16, so an update of less than a few thousandths of a weight is rounded away."
    assert torch.bfloat16 not in {parameter.dtype for parameter in model.parameters()}, kept
    require_sharded(model)
    loss = (model(x.chunk(n)[rank]).float() ** 2).mean()
    for number, dtype in enumerate(computed):
        alone = f"Block {number} computes in {dtype}: each call of fully_shard needs a policy with a param_dtype."
        assert dtype == torch.bfloat16, alone
    require_step(model, optimizer, loss)


def test_07_5(rank, n):
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


class Sum(torch.autograd.Function):
    """The notebook's: forward the sum over all ranks; backward the gradient as it is."""

    @staticmethod
    def forward(context, x):
        x = x.clone()
        torch.distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


def test_07_6(rank, n):
    program.setdefault("Sum", Sum)
    torch.manual_seed(0)
    shapes = (5, 4), (6, 4), (6,), (4, 6), (4,)
    x, up, up_bias, down, down_bias = tensors = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    result = linear(linear(x, up, up_bias).relu(), down, down_bias)
    (result**2).sum().backward()

    def mine(of_x, of_up, of_up_bias, of_down, of_down_bias):
        """Return this rank's part of each tensor: its half of the hidden layer."""
        hidden = of_up.chunk(n)[rank], of_up_bias.chunk(n)[rank], of_down.chunk(n, 1)[rank]
        return [tensor.detach().clone() for tensor in (of_x, *hidden, of_down_bias)]

    right = mine(*(tensor.grad for tensor in tensors))
    parts = [tensor.requires_grad_() for tensor in mine(*tensors)]
    calls, where = watch(program, *COLLECTIVES), f"On rank {rank}"
    own = mlp(*parts)
    forward = len(calls)
    assert forward, f"{where} nothing is added up: each rank has the sum over its own inputs alone."
    apart = f"{where} the output isn't a single device's. Is every bias in it, and only once?"
    assert close(ratio([own.detach()], [result.detach()]), 1, 1e-3), apart
    assert forward == 1, f"{where} the forward pass has {forward} all-reduces; one is enough."
    (own**2).sum().backward()
    for name, part, wanted in zip(("x", "up", "up_bias", "down", "down_bias"), parts, right, strict=True):
        half = "is of this rank's half of the hidden layer alone" if name == "x" else "isn't a single device's"
        assert close(ratio([part.grad], [wanted]), 1, 1e-3), f"{where} the gradient of {name} {half}."
    backward = len(calls) - forward
    assert backward == 1, f"{where} the backward pass has {backward} all-reduces, not one."

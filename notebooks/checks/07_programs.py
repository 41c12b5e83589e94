"""Tests of the programs in notebook 07: an all-reduce in halves; FSDP by hand, in bf16, over nodes; a split layer."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

from checks.helpers import COLLECTIVES, MISSING, close, gathered, ratio, watch


def test_07_1(rank, n):
    halves = ["reduce_scatter", "all_gather"]
    tensor, calls = torch.arange(1.0, 2 * n + 1) * 10**rank, watch(program, *COLLECTIVES)
    all_reduce(tensor, n)
    used, value = [name for name, _ in calls], [round(number) for number in tensor.tolist()]
    other, numbers = sorted(set(used) - set(halves)), range(1, 2 * n + 1)
    assert not other, f"Rank {rank} calls {', '.join(other)}: use {' and '.join(halves)}."
    kept = f"Rank {rank} still has its own numbers: the result must go into the tensor itself."
    assert value != [number * 10**rank for number in numbers], kept
    where = f"On rank {rank} the tensor is {value}"
    assert value != [number * 37 for number in numbers], f"{where}: this is the mean, but an all-reduce adds up."
    assert value == [number * 111 for number in numbers], f"{where}, which isn't the sum over all ranks."
    unused = [name for name in halves if name not in used]
    assert not unused, f"It is the sum, but rank {rank} doesn't call {' and '.join(unused)}."


def test_07_2(rank, n):
    torch.manual_seed(0)
    weight, images, targets = torch.randn(6, 4), torch.randn(8, 4), torch.randn(8, 6)
    whole = weight.clone().requires_grad_()
    ((images @ whole.T - targets) ** 2).mean().backward()
    rows, right = weight.chunk(n)[rank].clone(), whole.grad.chunk(n)[rank]
    calls = watch(program, *COLLECTIVES)
    own = gradient(rows, images.chunk(n)[rank], targets.chunk(n)[rank], n)
    used, where = {name for name, _ in calls}, f"On rank {rank}"
    assert "all_gather" in used, f"{where} the weight is never gathered from all ranks."
    assert isinstance(own, torch.Tensor), f"{where} no tensor is returned."
    shape = tuple(own.shape)
    assert shape != (6, 4), f"{where} the whole gradient is returned, but a rank keeps only its own rows."
    assert shape == (3, 4), f"{where} the gradient has the shape {shape}, but the rows have (3, 4)."
    times = ratio([own], [right])
    mixed = "It should be the whole batch's: whose images, and which rows, are in it?"
    assert times is not None, f"{where} the gradient points in another direction. {mixed}"
    assert not close(times, 2), f"{where} the gradient is the sum over the ranks, not the mean."
    assert close(times, 1), f"{where} the gradient is {times:.2f} times the whole batch's."
    assert "all_reduce" not in used, f"{where} an all-reduce brings all rows, to keep some: use reduce-scatter."


def test_07_3(rank, n):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = prepare(model, init_device_mesh("cpu", (n,)))
    (model(torch.randn(8, 4)) ** 2).mean().backward()
    optimizer.step()
    after = [getattr(parameter, "full_tensor", parameter.detach)() for parameter in model.parameters()]
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    blocks, whole = [isinstance(block, FSDPModule) for block in model], isinstance(model, FSDPModule)
    assert any(blocks) or whole, "Nothing is sharded: every rank still has the whole model."
    assert any(moved), "After a step no weight has changed: the optimizer holds tensors that the model no longer uses."
    assert all(moved), "After a step some of the weights haven't changed: who trains them?"
    assert all(blocks), "The blocks are gathered all at once, so each rank holds the whole model in every step."
    alone = "Each block is a root of its own, and by default a root keeps its gathered weights after the forward pass."
    assert whole, alone


def blocks_and_batch():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]), torch.randn(8, 4)


def test_07_4(rank, n):
    model, x = blocks_and_batch()
    computed = {}
    for number, block in enumerate(model):
        block[0].register_forward_pre_hook(
            lambda layer, _, number=number: computed.update({number: layer.weight.dtype})
        )
    optimizer = prepare(model, init_device_mesh("cpu", (n,)))
    stored, whole = {parameter.dtype for parameter in model.parameters()}, isinstance(model, FSDPModule)
    kept = "The weights are stored in bf16, so an update of less than a few thousandths of a weight is rounded away."
    assert torch.bfloat16 not in stored, kept
    assert whole and all(isinstance(block, FSDPModule) for block in model), "Some block, or the model, isn't sharded."
    (model(x.chunk(n)[rank]).float() ** 2).mean().backward()
    wrong = [number for number, dtype in computed.items() if dtype != torch.bfloat16]
    alone = "each call of fully_shard needs a policy with a param_dtype."
    assert not wrong, f"Block {wrong[0] if wrong else ''} computes in {computed[wrong[0]] if wrong else ''}: {alone}"
    before = [parameter.detach().to_local().clone() for parameter in model.parameters()]
    optimizer.step()
    after = [parameter.detach().to_local() for parameter in model.parameters()]
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert all(moved), "After a step some of the weights haven't changed: which tensors does the optimizer hold?"


def test_07_5(rank, n):
    model, x = blocks_and_batch()
    right = [*torch.autograd.grad((model(x) ** 2).mean(), list(model.parameters()))]
    prepare(model, 2, 2)
    sharded = [isinstance(block, FSDPModule) for block in model]
    assert any(sharded) or isinstance(model, FSDPModule), "Nothing is sharded: every rank still has the whole model."
    assert all(sharded), "The blocks are gathered all at once, so each rank holds the whole model in every step."
    assert isinstance(model, FSDPModule), "The model itself isn't sharded, so each block is a root of its own."
    rows = gathered(model[0][0].weight.to_local().detach().tolist())
    assert len(rows[0]) != 1, "Each rank stores a quarter, so every block's weights are gathered across the network."
    same = [other for other in range(n) if rows[other] == rows[0]]
    assert same != [0, 1], "Ranks 0 and 1 store the same rows, but they share a node: here it should store them once."
    assert same == [0, 2], f"Rank 0's rows are stored by the ranks {same}, not by ranks 0 and 2, one in each node."
    (model(x.chunk(n)[rank]) ** 2).mean().backward()
    times = ratio([parameter.grad.full_tensor() for parameter in model.parameters()], right)
    assert times is not None and close(times, 1), f"On rank {rank} the gradients aren't the whole batch's."


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
    x, up, up_bias, down, down_bias = whole = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    result = linear(linear(x, up, up_bias).relu(), down, down_bias)
    (result**2).sum().backward()

    def mine(of_x, of_up, of_up_bias, of_down, of_down_bias):
        """Return this rank's part of each tensor: its half of the hidden layer."""
        hidden = of_up.chunk(n)[rank], of_up_bias.chunk(n)[rank], of_down.chunk(n, 1)[rank]
        return [tensor.detach().clone() for tensor in (of_x, *hidden, of_down_bias)]

    right = mine(*(tensor.grad for tensor in whole))
    parts = [tensor.requires_grad_() for tensor in mine(*whole)]
    calls, where = watch(program, *COLLECTIVES), f"On rank {rank}"
    own = mlp(*parts)
    shape = getattr(own, "shape", None)
    assert shape == result.shape, f"{where} the output has the shape {shape}, but x has {tuple(result.shape)}."
    forward, times = len(calls), ratio([own.detach()], [result.detach()])
    assert forward, f"{where} nothing is added up: each rank has the sum over its own inputs alone."
    apart = f"{where} the output isn't a single device's. Is every bias in it, and only once?"
    assert times is not None and close(times, 1, 1e-3), apart
    assert forward == 1, f"{where} the forward pass has {forward} all-reduces; one is enough."
    (own**2).sum().backward()
    for name, part, wanted in zip(("x", "up", "up_bias", "down", "down_bias"), parts, right, strict=True):
        times, whose = ratio([part.grad], [wanted]), f"{where} the gradient of {name}"
        assert times != MISSING, f"{whose} is missing."
        half = "of this rank's half of the hidden layer alone" if name == "x" else "not a single device's"
        assert times is not None, f"{whose} is {half}."
        assert close(times, 1, 1e-3), f"{whose} is {times:.2f} times a single device's."
    backward = len(calls) - forward
    assert backward == 1, f"{where} the backward pass has {backward} all-reduces, not one."

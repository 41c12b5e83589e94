"""Tests of the programs in notebook 44: a split MLP, and the seeds of its slices."""
# ruff: noqa: F821 - what the reader's program defines

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from checks.helpers import COLLECTIVES, close, gathered, ratio, watch


class Sum(torch.autograd.Function):
    """The notebook's: forward the sum over all ranks; backward the gradient as it is."""

    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


def test_44_1(rank, n):
    program.setdefault("Sum", Sum)
    torch.manual_seed(0)
    shapes = (5, 4), (6, 4), (6,), (4, 6), (4,)
    x, up, up_bias, down, down_bias = tensors = [
        torch.randn(*shape, requires_grad=True) for shape in shapes
    ]
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
        half = (
            "is of this rank's half of the hidden layer alone" if name == "x" else "isn't a single device's"
        )
        assert part.grad is not None, f"{where} {name} gets no gradient. What does your backward return?"
        assert close(ratio([part.grad], [wanted]), 1, 1e-3), f"{where} the gradient of {name} {half}."
    backward = len(calls) - forward
    assert backward == 1, f"{where} the backward pass has {backward} all-reduces, not one."


def test_44_2(rank, n):
    drawn = dict(zip(("up", "down", "norm"), weights(rank, n), strict=True))
    shapes = {"up": (12 // n, 4), "down": (4, 12 // n), "norm": (4,)}
    for name, tensor in drawn.items():
        shape = tuple(tensor.shape)
        assert shape == shapes[name], (
            f"{name} has the shape {shape} on rank {rank}; a rank stores {shapes[name]}."
        )
        assert tensor.std() > 0.02, f"{name} isn't random on rank {rank}."
    first, second = gathered({name: tensor.detach().tolist() for name, tensor in drawn.items()})[:2]
    for name in ("up", "down"):
        assert first[name] != second[name], (
            f"Ranks 0 and 1 have drawn the same slice of {name}: their hidden units are equal, get equal gradients and "
            f"stay equal, so {n} ranks train a layer of {12 // n} units that they pay {n} times for."
        )
    assert first["norm"] == second["norm"], (
        "Ranks 0 and 1 have drawn different norms, which should be one tensor: from the first step on, they scale "
        "the same tokens differently."
    )
    again = dict(zip(drawn, weights(rank, n), strict=True))
    same = all(torch.equal(drawn[name], again[name]) for name in drawn)
    assert same, "A second call draws other weights: without a fixed seed, no run can be repeated."

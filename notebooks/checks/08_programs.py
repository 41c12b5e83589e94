"""Tests of the programs in notebook 08: a split layer, its seeds, a mask, tokens on their way, a mesh."""
# ruff: noqa: F821 - what the reader's program defines

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from checks.helpers import COLLECTIVES, close, gathered, ratio, require_gradients, watch


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


def test_08_1(rank, n):
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


def test_08_2(rank, n):
    drawn = dict(zip(("up", "down", "norm"), weights(rank, n), strict=True))
    shapes = {"up": (12 // n, 4), "down": (4, 12 // n), "norm": (4,)}
    for name, tensor in drawn.items():
        shape = tuple(tensor.shape)
        assert shape == shapes[name], f"{name} has the shape {shape} on rank {rank}; a rank stores {shapes[name]}."
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


def test_08_3(rank, n):
    torch.manual_seed(0)
    chunk = 4
    wholes = [torch.randn(2, 2, 2 * n * chunk, 8) for _ in range(3)]
    right = scaled_dot_product_attention(*wholes, is_causal=True)

    def mine(whole):
        chunks = whole.chunk(2 * n, dim=2)
        return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], dim=2)

    own, wanted = attention(*map(mine, wholes), rank, n), mine(right)
    assert own.shape == wanted.shape, f"The output has the shape {tuple(own.shape)}, the queries {tuple(wanted.shape)}."
    wrong = (~((own - wanted).abs().amax((0, 1, 3)) < 1e-4)).tolist()  # also where it is nan
    numbers = [rank * chunk + k for k in range(chunk)] + [(2 * n - 1 - rank) * chunk + k for k in range(chunk)]
    places = [place for place, bad in zip(numbers, wrong, strict=True) if bad]
    everywhere = gathered(places)
    first = next((r for r, found in enumerate(everywhere) if found), None)
    assert first is None, (
        f"On rank {first} the output is wrong at these positions of the sequence: "
        f"{', '.join(map(str, everywhere[first]))}. Which positions have its queries, and which the keys, in the order "
        "in which they were gathered?"
    )


def test_08_4(rank, n):
    torch.manual_seed(0)
    weight = torch.randn(n, 4, 4)
    cases = {"balanced": [1, 0, 0, 1, 1, 0, 1, 0], "unbalanced": [1, 0, 1, 1, 1, 1, 1, 0]}
    for name, chosen in cases.items():
        x, chosen = torch.randn(8, 4) + rank, torch.tensor(chosen)
        right = torch.stack([weight[e] @ row for e, row in zip(chosen, x, strict=True)])
        try:
            own = through_experts(x, chosen, lambda rows: rows @ weight[rank].T, n)
        except (RuntimeError, ValueError) as error:
            to, back = [*map(sum, zip(*gathered(torch.bincount(chosen, minlength=n).tolist()), strict=True))], len(x)
            raise AssertionError(
                f"With {to[rank]} tokens for the expert of rank {rank}, which sent {back}, the exchange fails: do the "
                f"lists of the way back fit what is sent? ({str(error).splitlines()[0]})"
            ) from None
        assert own.shape == right.shape, f"There are {len(own)} outputs for {len(x)} tokens."
        wrong = ((own - right).abs().amax(1) > 1e-4).nonzero().flatten().tolist()
        assert not wrong, (
            f"With {name} experts, tokens of rank {rank} get an output that isn't theirs "
            f"({', '.join(map(str, wrong))}): does each output return to the place of its token?"
        )


def test_08_5(rank, n):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(8, 4)
    right = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
    mesh = backward(model, batch, 2, 2)
    partners = gathered(mesh["tensor"].mesh.tolist())[0]
    assert partners == [0, 1], (
        f"Rank 0 splits layers with rank {partners[-1]}, which is on the other node, so the activations of every layer "
        "cross the network."
    )
    stored = model[0].weight.to_local().numel()
    assert stored == 8, f"Each rank stores {stored} of the 32 weights of the first layer, not a quarter."
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    hint = "Do both ranks of a tensor-parallel group get the same samples?"
    require_gradients(grads, right, f"On rank {rank}", hint)

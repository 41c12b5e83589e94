"""Tests of the programs in notebook 08: what a split layer holds, a mesh."""
# ruff: noqa: F821 - what the reader's program defines

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

from checks.helpers import COLLECTIVES, close, gathered, ratio, require_gradients, watch


def all_gather(part):
    """The notebook's: the tokens of all ranks, from the last dimension but one of each rank's tensor."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim=-2)


def reduce_scatter(whole):
    """The notebook's: the sum over ranks of this rank's tokens."""
    parts = [part.contiguous() for part in whole.chunk(dist.get_world_size(), dim=-2)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own


def stashed(node):
    """Return the tensors that a graph's nodes hold as attributes, where no hook sees them."""
    found = [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
    return found + [
        tensor for following, _ in node.next_functions if following for tensor in stashed(following)
    ]


def test_08_3(rank, n):
    program.setdefault("all_gather", all_gather), program.setdefault("reduce_scatter", reduce_scatter)
    torch.manual_seed(0)
    whole, weight, bias = x, w, b = [
        torch.randn(*s, requires_grad=True) for s in ((2, 4 * n, 5), (3 * n, 5), (3 * n,))
    ]
    (right := linear(x, w, b)).backward(arriving := torch.randn(2, 4 * n, 3 * n))
    columns = [tensor.detach().chunk(n)[rank].clone().requires_grad_() for tensor in (weight, bias)]
    part = whole.detach().chunk(n, 1)[rank].clone().requires_grad_()
    held, calls = [], watch(program, *COLLECTIVES)
    with saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        output = Columns.apply(part, *columns)
    forward = Counter(name for name, _ in calls)
    require_columns(output, right.chunk(n, -1)[rank], n)
    large = [t for t in (*held, *stashed(output.grad_fn)) if t.untyped_storage().nbytes() >= whole.nbytes]
    shape = tuple(large[0].shape) if large else ()
    assert not large, (
        f"The output is right, but until the backward pass memory holds {shape}: the tokens of all ranks."
    )
    try:
        output.backward(arriving.chunk(n, -1)[rank].contiguous())
    except RuntimeError as error:
        refused = "invalid gradient at index 0" in str(error)
        all_tokens = "The gradient of `part` has all ranks' tokens. A rank needs its own, and has its part of each sum."
        raise AssertionError(all_tokens if refused else str(error)) from None
    backward = Counter(name for name, _ in calls) - forward
    require_parts(
        part, columns, whole.grad.chunk(n, 1)[rank], [t.grad.chunk(n) for t in (weight, bias)], rank
    )
    most = "It's right, but the backward pass has {}. It needs an all-gather and a reduce-scatter."
    assert backward == {"all_gather": 1, "reduce_scatter": 1}, most.format(in_words(backward))
    return f"Autograd holds {tuple(part.shape)} instead of {tuple(whole.shape)}. The layer now has " + (
        f"{in_words(forward + backward)}, one all-gather more than before: you pay for memory with bytes on the wire."
    )


def in_words(calls):
    return " and ".join(
        f"{number} {name.replace('_', '-')}{'s' * (number > 1)}" for name, number in calls.items()
    )


def require_columns(output, right, n):
    """Require this rank's columns for the tokens of all ranks, in order."""
    shape = tuple(output.shape)
    assert shape == tuple(right.shape), (
        f"The output has the shape {shape}; all tokens give {tuple(right.shape)}."
    )
    order = "The outputs are right, but not in the order of the tokens: rank 0's come first."
    backwards = torch.cat(right.chunk(n, 1)[::-1], 1)
    assert not close(ratio([output.detach()], [backwards.detach()]), 1, 1e-3), order
    missing = "The output isn't one device's. Is the bias in it?"
    assert close(ratio([output.detach()], [right.detach()]), 1, 1e-3), missing


def require_parts(part, columns, right, slices, rank):
    """Require one device's gradients of this rank's tokens, its slice of the weight and of the bias."""
    alone = (
        "The gradient of `part` is of this rank's columns alone: the ranks' partial sums aren't added up."
    )
    assert close(ratio([part.grad], [right]), 1, 1e-3), alone
    for name, own, wanted in zip(("weight", "bias"), columns, slices, strict=True):
        added = f"The gradient of `{name}` is added up over ranks. Their columns differ: each has its own in full."
        assert not ratio([own.grad], [sum(wanted)]) > 0, added
        wrong = f"The gradient of `{name}` isn't one device's. It's a sum over the tokens of all ranks, in their order."
        assert close(ratio([own.grad], [wanted[rank]]), 1, 1e-3), wrong


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
    require_gradients(
        grads, right, f"On rank {rank}", "Do both ranks of a tensor-parallel group get the same samples?"
    )

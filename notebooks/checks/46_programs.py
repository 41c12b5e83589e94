"""Tests of the programs in notebook 46: half a block with split tokens, and a layer that holds only its own."""
# ruff: noqa: F821 - what the reader's program defines

from collections import Counter

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear, rms_norm

from checks.helpers import COLLECTIVES, close, ratio, watch
from mpdemo.labs.tokens import Gather, all_gather, reduce_scatter


class Scatter(torch.autograd.Function):
    """The notebook's: this rank's tokens of the sum; backward the tokens of all ranks."""

    @staticmethod
    def forward(context, whole):
        return reduce_scatter(whole)

    @staticmethod
    def backward(context, gradient):
        return all_gather(gradient)


def test_46_1(rank, n):
    program.setdefault("Gather", Gather), program.setdefault("Scatter", Scatter)
    torch.manual_seed(0)
    shapes = (2 * n, 4), (4,), (4, 3 * n), (3 * n, 4)
    x, scale, up, down = tensors = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    right = x + (rms_norm(x, scale.shape, scale) @ up).relu() @ down
    right.backward(arriving := torch.randn(2 * n, 4))

    def mine(of_x, of_scale, of_up, of_down):
        """Return this rank's part of each tensor: its tokens, and its half of the hidden layer."""
        parts = of_x.chunk(n)[rank], of_scale, of_up.chunk(n, 1)[rank], of_down.chunk(n)[rank]
        return [tensor.detach().clone() for tensor in parts]

    parts = [tensor.requires_grad_() for tensor in mine(*tensors)]
    calls, where = watch(program, *COLLECTIVES), f"On rank {rank}"
    try:
        output = half_block(*parts)
    except (RuntimeError, TypeError) as error:
        said = f"{where} a line can't be computed ({str(error).splitlines()[0]}). Which tensors have all ranks' tokens?"
        raise AssertionError(said) from None
    require_tokens(output, right.chunk(n)[rank], x.chunk(n)[rank], where)
    forward = Counter(name for name, _ in calls)
    most = f"It's right, but the forward pass has {in_words(forward)}. It needs an all-gather and a reduce-scatter."
    assert len(calls) == 2, most
    output.backward(arriving.chunk(n)[rank])
    wanted = mine(*(tensor.grad for tensor in tensors))
    for name, part, one in zip(("part", "scale", "up", "down"), parts, wanted, strict=True):
        lost = f"{where} the gradient of {name} isn't one device's. Autograd knows Gather.apply and Scatter.apply only."
        assert part.grad is not None, lost
        if name == "scale":
            dist.all_reduce(part.grad)  # the notebook does this afterwards
        assert close(ratio([part.grad], [one]), 1, 1e-3), lost


def require_tokens(output, right, part, where):
    """Require one device's output of this rank's tokens."""
    shape = tuple(output.shape)
    assert shape == tuple(right.shape), (
        f"{where} the output has the shape {shape}; this rank's tokens have {tuple(right.shape)}."
    )
    without = f"{where} the residual is missing, or counts twice."
    for bare in (right - part, right + part):
        assert not close(ratio([output.detach()], [bare.detach()]), 1, 1e-3), without
    apart = f"{where} the output isn't one device's. Which line needs all tokens, and where are partial sums added up?"
    assert close(ratio([output.detach()], [right.detach()]), 1, 1e-3), apart


def stashed(node):
    """Return the tensors that a graph's nodes hold as attributes, where no hook sees them."""
    found = [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
    return found + [
        tensor for following, _ in node.next_functions if following for tensor in stashed(following)
    ]


def test_46_2(rank, n):
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

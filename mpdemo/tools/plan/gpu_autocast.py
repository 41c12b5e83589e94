"""Autocast on a CPU's fake tensors with the types and the memory that it has on a GPU.

PyTorch has a list of operations for each kind of device
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). On a GPU more of them compute in 32 bits, and a
softmax reads 16 bits and writes 32 in one kernel, where a CPU would copy first: for a GPT with 50,304 tokens that copy
was 3 of 35 GiB, which an H100 did not need.
"""

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mpdemo.predict.counting import has_16_bits


def named(names) -> set:
    """Return the functions and methods of PyTorch that have these names."""
    places = torch, torch.Tensor, functional
    return {getattr(place, name) for place in places for name in names.split() if hasattr(place, name)}


FUSED = named("softmax log_softmax")
IN_32_BITS = named(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ norm cumprod "
    "cumsum prod sum layer_norm group_norm softplus cosine_similarity dist cdist"
)


class GpuAutocast(TorchFunctionMode):
    """In a ``with`` block, what autocast does to fake tensors of a CPU is what it would do on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and has_16_bits(args[0]) and torch.is_autocast_enabled("cpu"):
            if func in FUSED:
                return _Softmax.apply(args[0])
            if func is functional.cross_entropy and _of_classes(*args, **kwargs):
                return _cross_entropy(*args, **kwargs)
            if func in IN_32_BITS:
                args = [arg.float() if has_16_bits(arg) else arg for arg in args]
        return func(*args, **kwargs)


class _Softmax(torch.autograd.Function):
    """Shapes and types of a softmax, or of its logarithm, and of its gradient; a plan needs no values."""

    @staticmethod
    def forward(ctx, logits):
        output = torch.empty_like(logits, dtype=torch.float32)
        ctx.save_for_backward(output)
        ctx.dtype = logits.dtype
        return output

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        return torch.empty_like(output, dtype=ctx.dtype)


def _of_classes(logits, target, *args, label_smoothing=0.0, **kwargs) -> bool:
    """Whether this loss is that of a log-softmax and one class per sample, as `_cross_entropy` computes it."""
    return not args and not label_smoothing and not target.is_floating_point()


def _cross_entropy(logits, target, label_smoothing=0.0, **kwargs):
    return functional.nll_loss(_Softmax.apply(logits), target, **kwargs)

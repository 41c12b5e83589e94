"""Operations on a CPU's fake tensors with the types, the memory and the messages that they have on a GPU.

For autocast PyTorch has a list of operations for each kind of device
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). On a GPU more of them compute in 32 bits, and a
softmax reads 16 bits and writes 32 in one kernel, where a CPU would copy first: for a GPT with 50,304 tokens that copy
was 3 of 35 GiB, which an H100 did not need. Others have one kernel on a GPU and several on a CPU, which keep more: RMS
norm, dropout, and attention with dropout.
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
RMS_NORM, DROPOUT = named("rms_norm"), named("dropout")
IN_32_BITS = named(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ norm cumprod "
    "cumsum prod sum layer_norm rms_norm group_norm softplus cosine_similarity dist cdist"
)


class OnGpu(TorchFunctionMode):
    """In a ``with`` block, what is done to fake tensors of a CPU is what would be done on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and has_16_bits(args[0]) and torch.is_autocast_enabled("cpu"):
            if func in FUSED:
                return _Softmax.apply(args[0])
            if func is functional.cross_entropy and _of_classes(*args, **kwargs):
                return _cross_entropy(*args, **kwargs)
            if func in IN_32_BITS:
                args = [arg.float() if has_16_bits(arg) else arg for arg in args]
        if func in RMS_NORM and args:
            return _rms_norm(func, *args, **kwargs)
        if func in DROPOUT and args:
            return _dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:  # a GPU draws again what is dropped, and keeps no scores
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = kwargs | {"dropout_p": 0.0}
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


def _rms_norm(func, x, normalized_shape, weight=None, eps=None):
    if weight is not None and weight.dtype != x.dtype:  # a GPU has no single kernel for it either
        return func(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, weight, len(normalized_shape))


class _RMSNorm(torch.autograd.Function):
    """Shapes of an RMS norm in one kernel, which keeps its input and a number for each row."""

    @staticmethod
    def forward(ctx, x, weight, dimensions):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.ndim - dimensions], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return x + gradient, None if weight is None else torch.empty_like(weight), None  # reads two and writes one


def _dropout(x, p=0.5, train=True, inplace=False, training=True):
    """Keep a mask of a byte for each number, where a CPU keeps a factor as wide as it."""
    return torch.native_dropout(x, p, True)[0] if p and train and training else x

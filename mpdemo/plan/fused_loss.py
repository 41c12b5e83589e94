"""The loss under autocast as a GPU computes it.

There, a log-softmax reads logits of 16 bits and writes 32 in one kernel, and so does its backward pass in the other
direction. A CPU, on whose autocast the plan's fake tensors depend, copies them to 32 bits first. For a GPT with 50,304
tokens that copy of the gradient was 3 of 35 GiB that an H100 did not need.
"""

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

LOG_SOFTMAX = functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax


class FusedLoss(TorchFunctionMode):
    """In a ``with`` block, compute log-softmax and cross-entropy of 16 bits on fake tensors as a GPU does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and torch.is_autocast_enabled("cpu") and _has_16_bits(args[0]):
            if func is functional.cross_entropy and _of_classes(*args, **kwargs):
                return _cross_entropy(*args, **kwargs)
            if func in LOG_SOFTMAX:
                return _LogSoftmax.apply(args[0])
        return func(*args, **kwargs)


class _LogSoftmax(torch.autograd.Function):
    """Shapes and types of a log-softmax and of its gradient; a plan needs no values."""

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


def _has_16_bits(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _of_classes(logits, target, *args, label_smoothing=0.0, **kwargs) -> bool:
    """Whether the loss is that of a log-softmax and one class per sample, as `_cross_entropy` computes it."""
    return not args and not label_smoothing and not target.is_floating_point()


def _cross_entropy(logits, target, label_smoothing=0.0, **kwargs):
    return functional.nll_loss(_LogSoftmax.apply(logits), target, **kwargs)

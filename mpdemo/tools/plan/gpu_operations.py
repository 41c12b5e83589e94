"""Operations on a CPU's fake tensors with the types, the memory and the messages that they have on a GPU.

For autocast PyTorch has a list of operations for each kind of device
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). On a GPU more of them compute in 32 bits, and a
softmax reads 16 bits and writes 32 in one kernel, where a CPU would copy first: for a GPT with 50,304 tokens that copy
was 3 of 35 GiB, which an H100 did not need. Others have one kernel on a GPU and several on a CPU, which keep more: RMS
norm, dropout, attention with dropout, and recurrent layers.
"""

from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from types import FunctionType
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from mpdemo.predict.counting import has_16_bits
from mpdemo.tools.plan.loading import without_device
from mpdemo.tools.plan.request import NotPlanned


def named(names) -> set:
    """Return the functions and methods of PyTorch that have these names."""
    places = torch, torch.Tensor, functional
    return {getattr(place, name) for place in places for name in names.split() if hasattr(place, name)}


FUSED = named("softmax log_softmax")
RMS_NORM, DROPOUT = named("rms_norm"), named("dropout")
IN_32_BITS = named(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ norm cumprod "
    "cumsum prod sum layer_norm rms_norm group_norm softplus cosine_similarity dist cdist kl_div l1_loss mse_loss "
    "nll_loss smooth_l1_loss binary_cross_entropy_with_logits"
)
RECURRENT = named("lstm gru rnn_tanh rnn_relu")
QUESTIONS = {
    name: value for name, value in vars(functional).items() if name.startswith("has_torch_function")
}


class OnGpu(TorchFunctionMode):
    """In a ``with`` block, what is done to fake tensors of a CPU is what would be done on a GPU, perhaps compiled."""

    def __init__(self, compiled=False):
        super().__init__()
        self.compiled = compiled

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.to) and (
            func is torch.Tensor.cuda or _names_a_gpu(args, kwargs)
        ):
            return without_device(args, kwargs)
        if _names_a_gpu((), kwargs):
            kwargs["device"] = "cpu"
        if self.compiled and func is functional.cross_entropy and not args[1].is_floating_point():
            return _FusedLoss.apply(args[0])
        if self.compiled and func is torch.Tensor.float and has_16_bits(args[0]):
            return args[0]  # in the registers of the next kernel
        if args and has_16_bits(args[0]) and torch.is_autocast_enabled("cpu"):
            if func in IN_16_BITS:
                return IN_16_BITS[func](*args, **kwargs)
            if func in IN_32_BITS:
                args = [arg.float() if has_16_bits(arg) else arg for arg in args]
        if func in RMS_NORM and args:
            return _rms_norm(func, *args, **kwargs)
        if func in DROPOUT and args:
            return _dropout(*args, **kwargs)
        if func in RECURRENT:
            return _recurrent(*args)
        if func is functional.scaled_dot_product_attention:
            args, kwargs = _without_dropout(args, kwargs)
        return _seen_inside(self, func, args, kwargs)


@contextmanager
def in_eager_mode():
    """Compile nothing of a reader's code, and take flex attention, which no CPU computes, for one of all pairs."""
    parts = {"_validate_device": lambda *_: None, "flex_attention_hop": _flex}
    with torch.compiler.set_stance("force_eager"), patch.multiple(flex_attention, **parts):
        yield


def _flex(query, key, value, *_):
    out = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return out, *(out.new_empty(out.shape[:-1], dtype=torch.float32) for _ in range(2))


def _names_a_gpu(args, kwargs) -> bool:
    """Return whether an operation names a GPU, which the model's code took for granted."""
    return any(
        str(value).startswith("cuda")
        for value in (*args[1:], kwargs.get("device"))
        if not isinstance(value, torch.Tensor)
    )


def _without_dropout(args, kwargs):
    """Return the arguments of an attention without dropout: a GPU draws again what it dropped, and keeps no scores."""
    if len(args) > 4:
        return (*args[:4], 0.0, *args[5:]), kwargs
    return args, kwargs | {"dropout_p": 0.0}


def _seen_inside(mode, func, args, kwargs):
    """Call a function; if it is one of torch.nn.functional that is written in Python, the mode sees what it calls."""
    if not (isinstance(func, FunctionType) and func.__module__ == functional.__name__):
        return func(*args, **kwargs)
    asked = chain([False], repeat(True))  # it first asks whether a mode wants to see it
    answers = {name: partial(_but_once, asked, question) for name, question in QUESTIONS.items()}
    with patch.multiple(functional, **answers), mode:
        return func(*args, **kwargs)


def _but_once(asked, question, *tensors):
    return next(asked) and question(*tensors)


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


class _FusedLoss(torch.autograd.Function):
    """Shapes of a cross entropy that is fused with its softmax: its gradient takes the place of the logits."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0]


def _cross_entropy(
    logits,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    logs = _Softmax.apply(logits)
    if target.is_floating_point():  # a probability of each class
        loss = -(logs * target).sum(1)
        return loss if reduction == "none" else loss.sum()
    loss = functional.nll_loss(logs, target, weight, size_average, ignore_index, reduce, reduction)
    return loss - label_smoothing * logs.sum(1).mean() if label_smoothing else loss


IN_16_BITS = {func: lambda logits, *args, **kwargs: _Softmax.apply(logits) for func in FUSED}
IN_16_BITS[functional.cross_entropy] = _cross_entropy


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
        # reads two and writes one
        return x + gradient, None if weight is None else torch.empty_like(weight), None


def _dropout(x, p=0.5, train=True, inplace=False, training=True):
    """Keep a mask of a byte for each number, where a CPU keeps a factor as wide as it."""
    return torch.native_dropout(x, p, True)[0] if p and train and training else x


def _recurrent(x, states, weights, bias, layers, dropout, training, both, batch_first):
    """Compute all layers and directions of an RNN as cuDNN does, whose kernels go over all steps."""
    each, is_lstm = 4 if bias else 2, isinstance(states, tuple)
    if len(weights) != each * layers * (1 + both):
        raise NotPlanned("an LSTM with proj_size has further kernels on a GPU, which a plan does not know")
    if torch.is_autocast_enabled("cpu"):
        x, weights = x.to(torch.bfloat16), [weight.to(torch.bfloat16) for weight in weights]
    x, last = x.transpose(0, 1) if batch_first else x, []
    for layer in range(layers):
        parts = []
        for _ in range(1 + both):
            parts.append(_Recurrence.apply(x, is_lstm, *weights[:each]))
            weights = weights[each:]
        last += [part[-1] for part in parts]
        x = _dropout(torch.cat(parts, -1) if both else parts[0], dropout, training and layer < layers - 1)
    x, last = x.transpose(0, 1) if batch_first else x, torch.stack(last)
    return (x, last, last.clone()) if is_lstm else (x, last)


class _Recurrence(torch.autograd.Function):
    """Shapes of one layer of an RNN in one direction, which keeps its gates and its states of all steps."""

    @staticmethod
    def forward(ctx, x, is_lstm, inner, outer, *biases):
        output = x.new_empty(x.shape[:-1].numel(), outer.shape[1])
        torch.mm(output, outer.t())  # is added to the gates
        gates = x.reshape(-1, x.shape[-1]) @ inner.t()
        cells = torch.empty_like(output) if is_lstm else None
        ctx.save_for_backward(x, inner, outer, gates, output, cells, *biases)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x, inner, outer, gates, output, _, *biases = ctx.saved_tensors
        slopes = torch.empty_like(gates)
        torch.mm(slopes, outer)  # the gradient of the state before
        rows = x.reshape(-1, x.shape[-1])
        return (
            (slopes @ inner).view_as(x),
            None,
            slopes.t() @ rows,
            slopes.t() @ output,
            *map(torch.empty_like, biases),
        )

"""Types and memory of operations on a GPU, found on fake tensors without one, are those of the plan's fake tensors."""

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpdemo.models.private_torch import FakeTensors, backward
from mpdemo.predict.counting import LiveMemory
from mpdemo.predict.meter import Kernels
from mpdemo.tools.plan.gpu_operations import OnGpu

CALLS = {
    "linear": lambda x: functional.linear(x, x),
    "add": lambda x: x + x,
    "gelu": functional.gelu,
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "rms_norm": lambda x: functional.rms_norm(x, (8,)),
    "dropout": lambda x: functional.dropout(x, 0.1),
    "module": lambda x: torch.nn.LayerNorm(8, device=x.device)(x),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "method": lambda x: x.softmax(-1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.zeros(8, dtype=torch.long, device=x.device)),
    "smoothed": lambda x: functional.cross_entropy(
        x, torch.zeros(8, dtype=torch.long, device=x.device), label_smoothing=0.1
    ),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "power": lambda x: x**2,
    "pow": lambda x: x.pow(2),
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "norm": torch.norm,
    "cumsum": lambda x: x.cumsum(0),
    "max": lambda x: x.amax(),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_types_are_those_of_a_gpu(call, dtype, gpu_autocast):
    types = []
    with FakeTensors(), torch.no_grad():
        for device in ("cuda", "cpu"):
            with OnGpu() if device == "cpu" else torch.no_grad(), torch.autocast(device, torch.bfloat16):
                types.append(call(torch.empty(8, 8, device=device, dtype=dtype)).dtype)
    assert types[0] == types[1]


def test_a_block_that_recomputes_has_the_same_types_again():
    norm = torch.nn.LayerNorm(8, dtype=torch.bfloat16)
    with FakeTensors(allow_non_fake_inputs=True), OnGpu(), torch.autocast("cpu", torch.bfloat16):
        x = torch.empty(4, 8, dtype=torch.bfloat16, requires_grad=True)
        backward(checkpoint(norm, x, use_reentrant=False).sum())  # PyTorch compares the types
    assert x.grad.dtype == torch.bfloat16


def test_a_softmax_under_autocast_is_not_copied():
    """Unit: logits in 16 bits. Logits, log-probabilities and their gradient in 32, gradient of the logits in 16."""
    memory = LiveMemory()
    with memory, FakeTensors(), OnGpu():
        logits = torch.empty(1024, 4096, dtype=torch.bfloat16, requires_grad=True)
        target = torch.empty(1024, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(logits, target, ignore_index=0)
        memory.start()
        backward(loss)
    assert memory.peak() / logits.nbytes == pytest.approx(1 + 2 + 2 + 1, abs=0.01)
    assert logits.grad.dtype == torch.bfloat16 and loss.dtype == torch.float32


def kept_and_moved(function, *shape):
    """Return what a function keeps for its backward pass, and moves, in units of its input, in 16 bits."""
    memory, kernels = LiveMemory(), Kernels()
    with memory, FakeTensors(allow_non_fake_inputs=True), OnGpu():
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        before = memory.live["cpu"]
        with kernels:
            result = function(x)
        kept = memory.live["cpu"] - before - result.nbytes
        with kernels:
            backward(result.float().sum())
    return kept / x.nbytes, sum(moved for *_, moved in kernels.work) / x.nbytes


@pytest.mark.parametrize("make", [torch.nn.RMSNorm, torch.nn.LayerNorm])
def test_a_norm_has_one_kernel_which_keeps_its_input(make):
    """As CUDA's _fused_rms_norm and native_layer_norm do; a CPU's RMS norm keeps five times its input in 16 bits."""
    kept, moved = kept_and_moved(make(4096).bfloat16(), 8, 512, 4096)
    assert kept < 0.01
    assert moved < 15  # of it 8 are the sum in 32 bits and its gradient


def test_dropout_keeps_a_byte_for_each_number():
    kept, _ = kept_and_moved(torch.nn.Dropout(0.1), 8, 512, 4096)
    assert kept == pytest.approx(0.5, abs=0.01)


def test_attention_with_dropout_keeps_no_scores():
    def attention(x, dropout):
        return functional.scaled_dot_product_attention(x, x, x, None, dropout, is_causal=True)

    with_dropout, without = (kept_and_moved(partial(attention, dropout=p), 1, 16, 2048, 64) for p in (0.1, 0.0))
    assert with_dropout == without and without[0] < 1
    assert kept_and_moved(lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), 1, 16, 2048, 64)

"""The types that autocast gives on a GPU, found on fake tensors without one, are those of the plan's fake tensors."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpdemo.models.private_torch import FakeTensors, backward
from mpdemo.predict.counting import LiveMemory
from mpdemo.tools.plan.gpu_autocast import GpuAutocast

CALLS = {
    "linear": lambda x: functional.linear(x, x),
    "add": lambda x: x + x,
    "gelu": functional.gelu,
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
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
            with GpuAutocast() if device == "cpu" else torch.no_grad(), torch.autocast(device, torch.bfloat16):
                types.append(call(torch.empty(8, 8, device=device, dtype=dtype)).dtype)
    assert types[0] == types[1]


def test_a_block_that_recomputes_has_the_same_types_again():
    norm = torch.nn.LayerNorm(8, dtype=torch.bfloat16)
    with FakeTensors(allow_non_fake_inputs=True), GpuAutocast(), torch.autocast("cpu", torch.bfloat16):
        x = torch.empty(4, 8, dtype=torch.bfloat16, requires_grad=True)
        backward(checkpoint(norm, x, use_reentrant=False).sum())  # PyTorch compares the types
    assert x.grad.dtype == torch.bfloat16


def test_a_softmax_under_autocast_is_not_copied():
    """Unit: logits in 16 bits. Logits, log-probabilities and their gradient in 32, gradient of the logits in 16."""
    memory = LiveMemory()
    with memory, FakeTensors(), GpuAutocast():
        logits = torch.empty(1024, 4096, dtype=torch.bfloat16, requires_grad=True)
        target = torch.empty(1024, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(logits, target, ignore_index=0)
        memory.start()
        backward(loss)
    assert memory.peak() / logits.nbytes == pytest.approx(1 + 2 + 2 + 1, abs=0.01)
    assert logits.grad.dtype == torch.bfloat16 and loss.dtype == torch.float32

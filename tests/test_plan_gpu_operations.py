"""Types and memory of operations on a GPU, found on fake tensors without one, are those of the plan's fake tensors."""

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpdemo.models.private_torch import FakeTensors, backward
from mpdemo.predict.counting import LiveMemory
from mpdemo.tools.plan.gpu_operations import OnGpu
from mpdemo.tools.plan.kernels import Kernels
from mpdemo.tools.plan.request import NotPlanned
from mpdemo.tools.plan.roof import OPTIMIZERS

# What PyTorch 2.11 does on a GPU with these is not known here.
NEWER = pytest.mark.xfail(torch.__version__ < "2.12", reason="PyTorch 2.11 computes it otherwise")
CALLS = {
    "linear": lambda x: functional.linear(x, x),
    "add": lambda x: x + x,
    "gelu": functional.gelu,
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "rms_norm": lambda x: functional.rms_norm(x, (8,)),
    "dropout": lambda x: functional.dropout(x, 0.1),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "method": lambda x: x.softmax(-1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "cross_entropy": lambda x: functional.cross_entropy(
        x, torch.zeros(8, dtype=torch.long, device=x.device)
    ),
    "smoothed": lambda x: functional.cross_entropy(
        x, torch.zeros(8, dtype=torch.long, device=x.device), label_smoothing=0.1
    ),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "with_logits": lambda x: functional.binary_cross_entropy_with_logits(x, x),
    "soft_classes": lambda x: functional.cross_entropy(x, x),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "embedding": lambda x: functional.embedding(torch.zeros(8, dtype=torch.long, device=x.device), x),
    "power": lambda x: x**2,
    "sum": lambda x: x.sum(),
    "norm": torch.norm,
    "cumsum": lambda x: x.cumsum(0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "call", [pytest.param(CALLS[name], id=name, marks=[NEWER] * (name == "rms_norm")) for name in CALLS]
)
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


def kept_and_work(function, *shape, dtype=torch.bfloat16):
    """Return what a function keeps for its backward pass, in units of its input, and the rows of its kernels."""
    memory, kernels = LiveMemory(), Kernels()
    with memory, FakeTensors(allow_non_fake_inputs=True), OnGpu():
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        before = memory.live["cpu"]
        with kernels:
            result = function(x)
        kept = memory.live["cpu"] - before - result.nbytes
        with kernels:
            backward(result.float().sum())
    return kept / x.nbytes, kernels.work


@pytest.mark.parametrize("make", [torch.nn.RMSNorm, torch.nn.LayerNorm])
def test_a_norm_has_one_kernel_which_keeps_its_input(make):
    """As CUDA's _fused_rms_norm and native_layer_norm do; a CPU's RMS norm keeps five times its input in 16 bits."""
    kept, work = kept_and_work(make(4096).bfloat16(), 8, 512, 4096)
    assert kept < 0.01
    moved = sum(row[3] for row in work) / (2 * 8 * 512 * 4096)
    assert moved < 15  # of it 8 are the sum in 32 bits and its gradient


def rows_of(x):
    return x.flatten(0, -2)


def classes(x):
    return torch.zeros(len(rows_of(x)), dtype=torch.long)


SMOOTHED = partial(functional.cross_entropy, label_smoothing=0.1)
# what a GPU's kernels (native_functions.yaml, derivatives.yaml) keep and write, in units of the input
BY_KERNEL = {
    # The logarithms are kept; of their gradient and the logits' one is new at a time.
    "cross entropy": (lambda x: functional.cross_entropy(rows_of(x), classes(x)), 1.0),
    "cross entropy, smoothed": (lambda x: SMOOTHED(rows_of(x), classes(x)), 1.0),
    "mse": (lambda x: functional.mse_loss(x, x.detach()), 0.0),
    "smooth l1": (lambda x: functional.smooth_l1_loss(x, x.detach()), 0.0),
    "with logits": (lambda x: functional.binary_cross_entropy_with_logits(x, x.detach()), 0.0),
    "KL": (lambda x: functional.kl_div(x, x.detach(), reduction="batchmean"), 0.0),
    "layer norm": (lambda x: functional.layer_norm(x, x.shape[-1:]), 0.0),
    "group norm": (lambda x: functional.group_norm(x.transpose(1, 2), 8), 0.0),
    "batch norm": (lambda x: functional.batch_norm(x.transpose(1, 2), None, None, training=True), 0.0),
    "softmax": (lambda x: x.softmax(-1), 0.0),  # its output
    "GELU": (functional.gelu, 0.0),
    "dropout": (torch.nn.Dropout(0.1), 0.5),  # a byte for each number
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [pytest.param(*BY_KERNEL[name], id=name, marks=[NEWER] * (name == "group norm")) for name in BY_KERNEL],
)
def test_losses_and_norms_keep_what_a_gpus_kernels_keep(function, expected):
    kept, _ = kept_and_work(function, 8, 512, 4096)
    assert kept == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_within_pytorchs_own_module_keeps_no_scores_but_those_that_it_returns(need_weights):
    """Scores of 16 heads over 1,024 tokens are 16 times the input; what is dropped of them takes a byte for each."""

    def attention(x, dropout):
        layer = torch.nn.MultiheadAttention(1024, 16, dropout, batch_first=True, dtype=x.dtype)
        return layer(x, x, x, need_weights=need_weights)[0]

    dropped, whole = (kept_and_work(partial(attention, dropout=p), 4, 1024, 1024)[0] for p in (0.1, 0.0))
    assert dropped - whole == pytest.approx(1.5 * 16 if need_weights else 0, abs=0.1)
    assert (whole > 16) == need_weights


def test_a_transformer_layer_keeps_what_its_parts_keep():
    """Query, key, value and attention with its copy; two sums, a norm; two layers of twice the width; three masks."""
    sizes = {"d_model": 1024, "nhead": 16, "dim_feedforward": 2048, "dropout": 0.1, "batch_first": True}
    kept, _ = kept_and_work(
        lambda x: torch.nn.TransformerEncoderLayer(**sizes, dtype=x.dtype)(x), 4, 1024, 1024
    )
    weights = (4 + 2 * 2) * 1024**2 / (4 * 1024 * 1024)
    assert kept - weights == pytest.approx(3 + 2 + 2 + 1 + 2 * 2 + 0.5 + 1 + 0.5, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mask", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.1)])
def test_attention_keeps_no_scores_with_a_mask_dropout_or_keys_that_queries_share(dtype, mask, dropout):
    """Flash and memory-efficient attention have kernels for both (PyTorch's sdp_utils.cpp); scores are 16 times x."""

    def attention(x):
        kind = {"attn_mask": torch.ones(1024, 1024, dtype=torch.bool)} if mask else {"is_causal": True}
        return functional.scaled_dot_product_attention(
            x, x[:, :4], x[:, :4], dropout_p=dropout, enable_gqa=True, **kind
        )

    kept, _ = kept_and_work(attention, 2, 16, 1024, 64, dtype=dtype)
    assert kept < 1


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_recurrent_layer_keeps_gates_and_states_and_its_products_are_those_of_its_formula(
    kind, gates, directions
):
    """As the documentation of nn.LSTM has them; on a CPU a layer is one operation per step, or one that keeps more."""
    layer = getattr(torch.nn, kind)(64, 64, batch_first=True, bidirectional=directions == 2)
    kept, work = kept_and_work(lambda x: layer(x)[0], 32, 512, 64, dtype=torch.float32)
    states = 1 if kind == "LSTM" else 0  # the cells; two outputs are kept beside the one that they make
    copied = 2 if directions == 2 else 0
    assert kept == pytest.approx(directions * (gates + states) + copied, abs=0.1)
    products = sum(sum(row[:3]) for row in work)
    assert products == pytest.approx(3 * 2 * directions * 32 * 512 * gates * 64 * 128, rel=0.01)
    assert len(work) < 60


def test_what_the_kernels_of_an_rnn_would_be_is_not_guessed():
    with FakeTensors(allow_non_fake_inputs=True), OnGpu(), pytest.raises(NotPlanned, match="proj_size"):
        torch.nn.LSTM(8, 8, proj_size=4)(torch.empty(4, 2, 8))


MADE = {  # as PyTorch makes them on a GPU: foreach is its default
    "sgd": (torch.optim.SGD, {"momentum": 0}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
}


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_has_the_states_and_holds_besides_them_what_a_plan_gives_it(name):
    make, options = MADE[name]
    memory = LiveMemory()
    with memory:
        weights = [torch.zeros(256, 256, requires_grad=True) for _ in range(8)]
        optimizer = make(weights, **options)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        memory.start()
        before = memory.live["cpu"]
        optimizer.step()
    size = sum(weight.nbytes for weight in weights)
    states = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )
    assert states / size == pytest.approx(OPTIMIZERS[name].states, abs=0.01)
    assert (memory.peak() - before) / size == pytest.approx(OPTIMIZERS[name].besides, abs=0.05)

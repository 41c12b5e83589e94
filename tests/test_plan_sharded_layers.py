"""Memory of devices that share the layers, against published figures; test_labs_predictions.py counts real steps."""

import numpy as np
import pytest

from mpdemo.plan import sharded_layers, traffic
from mpdemo.plan.footprint import Footprint, Pass
from mpdemo.plan.memory import replica

GB = 1e9


def blocks_with(parameters, count=50):
    """Return blocks of so many parameters together, whose passes allocate nothing."""
    nothing = Pass(np.zeros((1, 2)), np.zeros((0, 2)), np.zeros((0, 2)))
    passes = dict.fromkeys(("forward", "first_backward", "backward", "input", "weight"), nothing)
    shape = (parameters // count // 1000, 1000)
    size = 4 * shape[0] * shape[1]
    return [Footprint(f"block.{i}", {"weight": shape}, size, size, size, 4, 4, passes) for i in range(count)]


def model_states(device):
    return device.weights + device.gradients + device.optimizer


@pytest.mark.parametrize(
    ("parameters", "shards", "published"),
    [
        (1_500_000_000, 1, 24),  # section 3.1: GPT-2
        (7_500_000_000, 1, 120),  # figure 1: the baseline, ordinary data parallelism
        (7_500_000_000, 64, 1.9),  # figure 1: all states sharded over 64 devices
    ],
)
def test_zero_is_met(parameters, shards, published):
    """https://arxiv.org/abs/1910.02054: 16 bytes per parameter with Adam, there in mixed precision, here in float32."""
    blocks = blocks_with(parameters)
    device = sharded_layers.device(blocks, 64, "adamw", shards=shards)
    assert model_states(device) / GB == pytest.approx(published, rel=0.02)
    assert model_states(replica(blocks, 64, 1, "adamw", ddp=True)) / GB == pytest.approx(16 * parameters / GB)


def transformer(width, layers, vocabulary=51_200, positions=1_024):
    """Return blocks with the parameters of GPT-2's kind: the embedding, then layers with names as in ours."""
    sizes = {"attention.query": (1, 1), "attention.key": (1, 1), "attention.value": (1, 1), "attention.out": (1, 1)}
    sizes |= {"mlp.up": (4, 1), "mlp.down": (1, 4)}
    embedding = {"tokens": (vocabulary, width), "positions": (positions, width)}
    layer = {f"{name}.weight": (a * width, b * width) for name, (a, b) in sizes.items()}
    nothing = blocks_with(1_000_000, 1)[0].passes
    shapes = [embedding, *[layer] * layers, {}]
    return [Footprint(f"block.{i}", own, 0, 0, 0, 4, 4, nothing) for i, own in enumerate(shapes)]


@pytest.mark.parametrize(
    ("width", "layers", "splits", "billions"),
    [(1536, 40, 1, 1.2), (1920, 54, 2, 2.5), (2304, 64, 4, 4.2), (3072, 72, 8, 8.3)],
)
def test_megatron_is_met(width, layers, splits, billions):
    """https://arxiv.org/abs/1909.08053, table 1: a billion parameters per GPU, however many split a layer."""
    blocks = transformer(width, layers)
    assert sum(block.parameters for block in blocks) / 1e9 == pytest.approx(billions, rel=0.02)
    device = sharded_layers.device(blocks, 8, "adamw", splits=splits)
    in_layers = device.weights / 4 - blocks[0].parameters  # here the embedding stays whole
    assert in_layers == 12 * width**2 * layers / splits
    assert 1.0 < in_layers / 1e9 < 1.2
    assert model_states(device) == 4 * device.weights < 32 * GB  # the V100 that they had


def test_fsdp_sends_half_as_much_again_as_ddp():
    """https://arxiv.org/abs/1910.02054, section 7: 3 Psi against 2 Psi."""
    blocks = blocks_with(7_500_000_000)
    ddp = traffic.ring_bytes(traffic.of_replicas(blocks), 64)
    assert traffic.ring_bytes(traffic.of_shards(blocks, 64), 64) == pytest.approx(1.5 * ddp, rel=1e-3)
    assert traffic.ring_bytes(traffic.of_shards(blocks, 64, reshard="never"), 64) == pytest.approx(ddp, rel=1e-3)

"""The options that save memory or time, on every rung and form: the same training as the single device.

The single device has the same precision and memory layout, and neither accumulates nor computes anything twice.
"""

import pytest
import torch
from conftest import need
from test_parallel_equality import CLOSE, case, named
from worlds import compared

from mpdemo import models, parallel
from mpdemo.errors import UserError
from mpdemo.labs.counting import peak_of_a_step
from mpdemo.labs.ladder import model_and_batch
from mpdemo.trial import Trial
from mpdemo.savings import check_compiler
from mpdemo.settings import Settings, checked
from mpdemo.trial import relative_difference
from mpdemo.world.env import World

TWICE = {"activation_checkpointing": True}
FORMAT = {"precision": "bf16", "channels_last": True}
ONE = {"form": "one-process"}
RUNGS = [  # batch norm: its statistics count as well
    ("data_parallel", ONE),
    ("ddp", {}),
    ("model_parallel", {}),
    ("model_parallel", ONE),
    ("pipeline", {"microbatches": 2, "schedule": "gpipe"}),
    ("pipeline", {"microbatches": 2} | ONE),
    ("hybrid", {"microbatches": 2, "devices": 2} | ONE),
]
PIPELINES = {"gpipe": TWICE, "1f1b": TWICE, "interleaved-1f1b": TWICE, "interleaved-zero-bubble": {}, "zbv": {}}
CASES = [
    *(case(rung, "convnet", "batch", batch_size=16, accumulate=2, **more, **TWICE) for rung, more in RUNGS),
    *(case(rung, "convnet", "batch", batch_size=8, **more, **FORMAT) for rung, more in RUNGS),
    *(case("pipeline", "toy", schedule=s, microbatches=4, accumulate=3, **more) for s, more in PIPELINES.items()),
    case("pipeline", "resnet18", "batch", schedule="zbv", microbatches=2, batch_size=4, channels_last=True),
    case("pipeline", "toy", schedule="zbv", microbatches=4, precision="bf16"),
    case("pipeline", "toy", schedule="interleaved-1f1b", microbatches=4, precision="bf16", **TWICE),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("options"), {2: CASES})[2]


def check(case, result):
    """Replicas each have statistics of their own, and use those of the first."""
    for what, difference in result["same"].items():
        apart = case["rung"] in ("data_parallel", "ddp", "hybrid") and case["norm"] == "batch"
        if not (apart and what in ("buffers", "validation")):
            assert difference < CLOSE, (what, difference)


@pytest.mark.parametrize("number", range(len(CASES)), ids=named(CASES))
def test_equal_to_the_single_device(results, number):
    check(CASES[number], results[number])


def test_compiled():
    """The first step of a process takes long, so one form has to do for all."""
    need("g++")
    plain = {"rung": "pipeline", "form": "one-process", "model": "toy", "batch_size": 16, "microbatches": 2}
    batch, world = model_and_batch(Settings(**plain))[1], World(device=torch.device("cpu"))
    model = models.build("toy")
    eager, compiled = (
        Trial(Settings(**plain, **more), world, model, batch) for more in ({}, {"compile": True} | TWICE)
    )
    assert relative_difference(compiled.gradients(), eager.gradients()) < CLOSE


def test_what_is_kept():
    """Bytes of a step: half a batch, or activations computed twice, need less."""
    plain = {"rung": "single", "model": "convnet", "batch_size": 32}
    model, batch = model_and_batch(Settings(**plain))
    world = World(device=batch[0].device)
    whole, halves, twice = (
        peak_of_a_step(Trial(Settings(**plain, **more), world, model, batch))
        for more in ({}, {"accumulate": 2}, {"activation_checkpointing": True})
    )
    assert halves < 0.7 * whole and twice < 0.9 * whole


def test_every_stage_has_the_options():
    settings = checked(Settings(rung="model_parallel", form="one-process", compile=True, **FORMAT, **TWICE))
    rung = parallel.make(models.build("convnet"), World(device=torch.device("cpu")), settings)
    for stage in rung.stages:
        assert (stage.precision, stage.checkpointing, stage.channels_last) == (torch.bfloat16, True, True)
        assert all(stage.get_submodule(name)._compiled_call_impl for name in stage.names)
    weight = rung.named_parameters()["layer2.0.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"rung": "ddp", "accumulate": 2, "microbatches": 4}, "are the same setting; give one of them"),
        (
            {"rung": "ddp", "micro_batch_size": 3},
            "does not divide by 2 devices x --micro-batch-size 3; allowed: a multi",
        ),
        ({"rung": "ddp", "micro_batch_size": 8, "accumulate": 3}, "contradicts --micro-batch-size, which gives 8"),
        ({"rung": "pipeline", "micro_batch_size": 8}, "belongs to --rung single, ddp or fsdp, not pipeline"),
        ({"rung": "ddp", "accumulate": 3}, "does not divide by 3 microbatches on 2 devices; allowed: a multiple of 6"),
        (
            {"rung": "pipeline", "accumulate": 3},
            "does not divide into --accumulate 3 parts; allowed: a multiple of 3",
        ),
        (
            {"rung": "pipeline", "accumulate": 16, "microbatches": 16},
            "each of the --accumulate 16 parts: a batch of 8",
        ),
        ({"rung": "pipeline", "accumulate": 2, "timeline": True}, "--timeline records a batch in one piece"),
        (
            {"rung": "model_parallel", "precision": "fp16"},
            "one loss scale, rung model_parallel has none; use bf16",
        ),
        ({"rung": "single", "model": "transformer", "channels_last": True}, "of no use to model transformer; leave it"),
        (
            {"rung": "pipeline", "schedule": "zbv", "model": "resnet18", "activation_checkpointing": True},
            "--activation-checkpointing does not go with --schedule zbv, which splits the backward pass",
        ),
        ({"rung": "pipeline", "schedule": "zbv", "model": "resnet18", "compile": True}, "--compile does not go with"),
        ({"rung": "data_parallel", "compile": True}, "--compile does not reach the copies that data_parallel makes"),
    ],
)
def test_refused(words, said):
    with pytest.raises(UserError, match=said):
        checked(Settings(**words))


def test_checked_settings_stay_as_they_are():
    """The processes that are started get them as options, and check them again."""
    for rung in ("single", "ddp", "model_parallel", "pipeline", "hybrid"):
        once = checked(Settings(rung=rung, accumulate=2))
        assert checked(once) == once and once.batch_size == 128
        assert once.accumulate * once.microbatches >= 2


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no-such-compiler is not found; install g\+\+ or set CXX"):
        check_compiler()

"""Sharded models are the same training as the single device, and resume the checkpoints of every other rung.

One world of two and one of four processes run all cases.
"""

import pytest
import torch
from test_parallel_equality import case, check_but_buffers, named
from test_parallel_hybrid import COMMON
from test_training import ROUNDING, epochs, far, losses, summary
from worlds import EQUALITY, TRAIN, run_worlds, written

from mpdemo.errors import UserError
from mpdemo.settings import Settings, checked
from mpdemo.training import checkpoint

TWICE, KEEP, TOKENS = {"activation_checkpointing": True}, {"reshard": "never"}, {"sequence_parallel": True}
SHARDED = {"sharded_checkpoints": True}
SMALL = {"model": "transformer", "batch_size": 8}
TWO = [
    case("fsdp", **SMALL, **KEEP, **TWICE, accumulate=2),
    case("fsdp", "convnet", "batch", **TWICE, precision="bf16"),
    case("tensor", **SMALL),
    case("tensor", **SMALL, **TOKENS, **TWICE, accumulate=2),
]
FOUR = [
    case("fsdp", "toy", accumulate=2),
    case("tensor", **SMALL, replicas=2, **TOKENS, **TWICE, accumulate=2),
]
TRAINING = COMMON | {"model": "transformer"}
PARTS = {  # one training of six steps, handed from rung to rung: how many processes, and the rung
    1: (2, {"rung": "ddp"}),
    2: (2, {"rung": "fsdp", **SHARDED}),
    3: (2, {"rung": "tensor", **TOKENS}),
    4: (4, {"rung": "tensor", "replicas": 2, **TOKENS, **SHARDED}),
    5: (4, {"rung": "fsdp", **SHARDED}),
    6: (1, {"rung": "single"}),
}


def part(folder, stop):
    """Return the settings of one of PARTS: it stops at its step with a checkpoint, from which the next goes on."""
    before = {"resume": str(folder / f"to-{stop - 1}")} if stop > 1 else {}
    out = {"out": str(folder / f"to-{stop}")}
    return {**TRAINING, "steps": stop, "checkpoint_every": stop, **PARTS[stop][1], **out, **before}


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """The folder in which all worlds of this file have run."""
    folder = tmp_path_factory.mktemp("sharding")
    runs = {n: [part(folder, stop) for stop, (processes, _) in PARTS.items() if processes == n] for n in (1, 2, 4)}
    runs[1] += [{**TRAINING, "steps": 6, "checkpoint_every": 6, "out": str(folder / "whole")}]
    worlds = []
    for n, cases in {2: TWO, 4: FOUR}.items():
        worlds.append([n, EQUALITY, written(folder / f"{n}.cases", cases), str(folder / f"{n}.results")])
    worlds += [[n, TRAIN, written(folder / f"{n}.runs", runs[n])] for n in (2, 4, 1)]
    runs_of_four = [str(folder / f"to-{stop}") for stop in (4, 5)]
    worlds.append([2, "tests/programs/damaged.py", *runs_of_four, str(folder / "damaged")])
    run_worlds(folder, worlds)
    return folder


@pytest.mark.parametrize("number", range(len(TWO)), ids=named(TWO))
def test_two_processes(ran, number):
    check_but_buffers(ran / "2.results", number, TWO[number])


@pytest.mark.parametrize("number", range(len(FOUR)), ids=named(FOUR))
def test_four_processes(ran, number):
    check_but_buffers(ran / "4.results", number, FOUR[number])


def test_sharded_rungs_resume_every_rung_and_are_resumed(ran):
    """With AdamW and a cosine: losses, validation and last weights are those of a training that nobody interrupted."""
    together = {step: loss for stop in PARTS for step, loss in losses(ran / f"to-{stop}").items()}
    assert far(together, losses(ran / "whole")) < ROUNDING
    ends = [checkpoint.read(checkpoint.newest(ran / name)) for name in ("to-6", "whole")]
    for what in ("model", "optimizer"):
        assert ends[0][what].keys() == ends[1][what].keys()
    for name, weight in ends[1]["model"].items():
        assert torch.linalg.vector_norm(ends[0]["model"][name] - weight) < 1e-4 * torch.linalg.vector_norm(weight), name
    assert epochs(ran / "to-6")[0]["validation_loss"] == pytest.approx(epochs(ran / "whole")[0]["validation_loss"])


def test_ranks_that_share_the_search_for_damage_use_the_same_checkpoint(ran):
    assert len(list((ran / "damaged/checkpoints/step-000005").iterdir())) > 2
    assert [(ran / f"damaged/rank-{rank}").read_text() for rank in (0, 1)] == ["4", "4"]


@pytest.mark.parametrize("stop", [2, 3, 4, 5])
def test_a_summary_counts_every_parameter_once(ran, stop):
    assert summary(ran / f"to-{stop}")["parameters"] == summary(ran / "whole")["parameters"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"rung": "ddp", "reshard": "never"}, "--reshard never belongs to --rung fsdp alone"),
        ({"rung": "fsdp", "sequence_parallel": True}, "--sequence-parallel belongs to --rung tensor alone"),
        ({"rung": "fsdp", "batch_size": 15}, "does not divide by 2 devices; allowed: a multiple of 2, such as 14"),
        ({"rung": "fsdp", "precision": "fp16"}, "one loss scale, rung fsdp has none; use bf16"),
        ({"rung": "fsdp", "model": "convnet", "channels_last": True}, "--channels-last does not go with --rung fsdp"),
        ({"rung": "tensor", "model": "convnet"}, "splits the layers of --model transformer alone, not of convnet"),
        ({"rung": "tensor", "processes": 4}, "6 heads do not divide by 4 processes; allowed: 2, 3, 6"),
        ({"rung": "tensor", "processes": 3, **TOKENS}, "16 tokens do not divide by 3 processes; allowed: 2"),
        ({"rung": "tensor", "replicas": 2, "processes": 2}, "2 processes do not make 2 replicas of 2 or more devices"),
        ({"rung": "tensor", "replicas": 4, "batch_size": 6}, "does not divide by 4 replicas; allowed: a multiple of 4"),
        ({"rung": "fsdp", "replicas": 2}, "--replicas belongs to --rung hybrid or tensor alone"),
        ({"rung": "tensor", "timeline": True}, "--timeline records rungs"),
        ({"rung": "fsdp", "form": "one-process"}, "rung fsdp has no form 'one-process'; allowed: per-device"),
    ],
)
def test_refused(words, said):
    with pytest.raises(UserError, match=said) as refusal:
        checked(Settings(**{"model": "transformer"} | words))
    assert "\n" not in str(refusal.value)


def test_checked_settings_stay_as_they_are():
    """The processes that are started get them as options, and check them again."""
    for words in ({"rung": "fsdp", **KEEP}, {"rung": "tensor", **TOKENS}):
        once = checked(Settings(model="transformer", accumulate=2, **words))
        assert checked(once) == once and once.microbatches == 2

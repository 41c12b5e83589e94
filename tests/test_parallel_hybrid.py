"""Replicas of a cut model are the same training as the single device, and resume the checkpoints of every other rung.

One world of four and one of six processes run all cases; the one-process form is in test_parallel_equality.py as well.
"""

import pytest
from test_parallel_equality import case, check_but_buffers, named
from test_training import ROUNDING, epochs, far, losses, summary
from worlds import EQUALITY, TRAIN, run_worlds, written

from mpdemo.errors import UserError
from mpdemo.settings import Settings, checked
from mpdemo.timeline import read

FOUR = [  # 2 replicas of 2 devices, unless said
    *(case("hybrid", "toy", schedule=name, microbatches=2) for name in ("gpipe", "interleaved-1f1b", "zbv")),
    case("hybrid", "toy", schedule="naive"),
    case("hybrid", "convnet", "batch", schedule="1f1b", microbatches=3, cut="layer2"),
    case("hybrid", "transformer", schedule="1f1b", microbatches=2, cut="block.2", batch_size=8),
    case("hybrid", "transformer", schedule="interleaved-zero-bubble", microbatches=2, mesh="pp-dp", batch_size=8),
    case("hybrid", "toy", schedule="1f1b", microbatches=2, accumulate=2),
    case("hybrid", "toy", form="one-process", devices=2, microbatches=3),  # 4 replicas
    case("hybrid", "convnet", "batch", form="one-process", microbatches=2, accumulate=3),
    *(case("hybrid", "toy", schedule=name, microbatches=2, sharded=True) for name in ("gpipe", "interleaved-1f1b")),
    case("hybrid", "transformer", schedule="1f1b", microbatches=2, accumulate=2, batch_size=8, sharded=True),
    case("hybrid", "convnet", "batch", schedule="naive", sharded=True, activation_checkpointing=True),
]
SIX = [  # 2 x 3 and 3 x 2
    case("hybrid", "toy", schedule="1f1b", microbatches=3, cut="linear1,linear2"),
    case("hybrid", "transformer", schedule="zbv", microbatches=3, batch_size=6),
    case("hybrid", "toy", schedule="interleaved-1f1b", microbatches=2, replicas=3),
]
COMMON = {"rung": "single", "model": "toy", "batch_size": 64, "epochs": 1, "optimizer": "adamw", "warmup_steps": 3,
          "lr_schedule": "cosine", "log_every": 1}  # fmt: skip
PARTS = {  # one training of eleven steps, handed from rung to rung
    3: {"rung": "ddp"},
    5: {"rung": "hybrid", "schedule": "zbv", "microbatches": 4, "timeline": True},
    6: {"rung": "pipeline", "microbatches": 4},
    8: {"rung": "hybrid", "form": "one-process", "microbatches": 2, "cut": "linear2", "sharded_checkpoints": True},
    9: {"rung": "hybrid", "schedule": "interleaved-1f1b", "microbatches": 2, "mesh": "pp-dp"},
    10: {"rung": "hybrid", "schedule": "1f1b", "microbatches": 2, "sharded": True, "sharded_checkpoints": True},
}


def handed_on(folder):
    """Yield the settings of PARTS: each stops at its step with a checkpoint, from which the next goes on."""
    before = None
    for stop, rung in PARTS.items():
        out = {"out": str(folder / f"to-{stop}"), "resume": before and str(folder / f"to-{before}")}
        yield {**COMMON, "steps": stop, "checkpoint_every": stop, **rung, **out}
        before = stop


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """The folder in which all worlds of this file have run."""
    folder = tmp_path_factory.mktemp("hybrid")
    alone = [{**COMMON, "steps": 11, "out": str(folder / "whole")},
             {**COMMON, "steps": 11, "out": str(folder / "end"), "resume": str(folder / "to-10")}]  # fmt: skip
    run_worlds(folder, [
        [4, EQUALITY, written(folder / "four.json", FOUR), str(folder / "four.results")],
        [6, EQUALITY, written(folder / "six.json", SIX), str(folder / "six.results")],
        [4, TRAIN, written(folder / "runs.json", list(handed_on(folder)))],
        [1, TRAIN, written(folder / "alone.json", alone)],
    ])  # fmt: skip
    return folder


@pytest.mark.parametrize("number", range(len(FOUR)), ids=named(FOUR))
def test_four_processes(ran, number):
    check_but_buffers(ran / "four.results", number, FOUR[number])


@pytest.mark.parametrize("number", range(len(SIX)), ids=named(SIX))
def test_six_processes(ran, number):
    check_but_buffers(ran / "six.results", number, SIX[number])


def test_hybrid_resumes_every_rung_and_is_resumed(ran):
    """With AdamW and a cosine: the losses and the validation are those of a training that nobody interrupted."""
    together = {step: loss for stop in PARTS for step, loss in losses(ran / f"to-{stop}").items()}
    together |= losses(ran / "end")
    assert far(together, losses(ran / "whole")) < ROUNDING
    resumed, wanted = epochs(ran / "end")[0], epochs(ran / "whole")[0]
    assert resumed["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=ROUNDING)


def test_a_summary_counts_every_parameter_once(ran):
    whole, resumed = summary(ran / "whole"), summary(ran / "to-5")
    assert resumed["parameters"] == whole["parameters"]
    assert (resumed["world_size"], resumed["settings"]["replicas"], resumed["settings"]["devices"]) == (4, 2, 2)


def test_the_timeline_has_two_pipelines_and_an_all_reduce_at_their_end(ran):
    steps = read.load(ran / "to-5")
    assert len(steps) == 2
    for rows in steps:
        work = {rank: [r for r in rows if r["rank"] == rank and r["kind"] in read.WORKS] for rank in range(4)}
        assert {rank: {row["stage"] for row in lane} for rank, lane in work.items()} == {
            0: {0, 3}, 1: {1, 2}, 2: {0, 3}, 3: {1, 2}}  # fmt: skip
        assert all([row["kind"] for row in lane].index("A") == len(lane) - 1 for lane in work.values())
        assert read.step_time(rows) == max(lane[-1]["end"] for lane in work.values())
    assert {event["rank"] for event in read.predict(steps, "zbv").events} == {0, 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"rung": "pipeline"}, "--sharded belongs to --rung hybrid, form per-device"),
        ({"replicas": 1}, "--sharded divides stages among replicas; allowed: --replicas 2 or more"),
        ({"form": "one-process"}, "--sharded belongs to --rung hybrid, form per-device"),
        ({"model": "convnet", "channels_last": True}, "--channels-last does not go with --sharded, which shards"),
        ({"precision": "fp16"}, "one loss scale, rung hybrid has none"),
        ({"schedule": "zbv"}, "--sharded does not go with --schedule zbv, which splits the backward pass"),
    ],
)
def test_what_cannot_be_sharded_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        checked(Settings(**{"rung": "hybrid", "model": "transformer", "sharded": True} | words))

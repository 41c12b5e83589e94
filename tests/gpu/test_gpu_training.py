"""Whole runs on GPUs: every strategy, a script's options, a checkpoint that changes devices, timelines."""

import itertools
import json
import re
import shutil

import pytest
from conftest import ON_CPU
from home_scripts import SCRIPTS, run
from test_training import losses, summary

CLOSE = 1e-3  # of losses after some steps on a GPU and on a CPU, which add in another order
RUNGS = ["single", "data_parallel", "ddp", "fsdp", "tensor", "model_parallel", "pipeline"]
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"


@pytest.fixture
def trained(run_once, tmp_path):
    """Train for some steps by a strategy's program; returns the losses by step, and the summary."""

    def train(rung, count, *words):
        launch = [] if rung in ("single", "data_parallel") else [*TORCHRUN, str(count)]
        options = ["--steps", "4", "--log-every", "1", "--out", str(tmp_path / "out"), *map(str, words)]
        done = run_once(*launch, "-m", f"mpdemo.rungs.{rung}", *options, timeout=300)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return losses(tmp_path / "out"), summary(tmp_path / "out")

    return train


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_trains_and_validates(trained, rung, count):
    if rung in ("model_parallel", "pipeline") and count < 2:
        pytest.skip(f"needs 2 GPUs, {count} here")
    steps, end = trained(rung, count, *["--devices", count] * (rung == "data_parallel"))
    assert len(steps) == 4 and all(0 < loss < 10 for loss in steps.values())
    assert 0 < end["validation_loss"] < 10
    assert (end["environment"]["device"] == "cpu core") == ON_CPU
    one = rung == "single" or (ON_CPU and rung == "data_parallel")
    assert len(end["peak_memory_mib"]) == (1 if one else count) and min(end["peak_memory_mib"]) > 0


def test_each_rank_says_where_it_is(run_once, count):
    said = run_once(*TORCHRUN, str(count), "-m", "mpdemo", "env", timeout=300).stdout
    assert "one row per rank" in said and "a GPU per rank" not in said, said
    assert ON_CPU or count < 2 or re.search(r" nccl +(P2P|SHM|NET)", said), said


@pytest.fixture
def gpt(tmp_path):
    """Run train_gpt.py in a copy of its folder for so many steps; returns the loss of each tenth step so far."""
    folder = shutil.copytree(SCRIPTS, tmp_path / "scripts")

    def train(steps, count, *words, name="saved"):
        options = ["--steps", steps, "--checkpoint", name, *words]
        printed = run(folder, "torchrun", *TORCHRUN[2:], count, "train_gpt.py", *options, seconds=300)
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)}

    return train


@pytest.mark.parametrize("option", ["--bf16", "--compile", "--recompute"])
def test_every_option_of_the_script_trains(gpt, option, count):
    plain = [f"--no-{name}" for name in ("bf16", "compile", "recompute")]
    one, other = gpt(10, count, *plain, name="plain"), gpt(10, count, *plain, option)
    assert one[10] == pytest.approx(other[10], rel=0.02 if option == "--bf16" else CLOSE)


def test_a_checkpoint_goes_from_cpu_to_gpu_and_back(gpt, monkeypatch):
    """The losses are those of a training run that stayed on the CPU."""
    plain = "--no-bf16", "--no-compile", "--no-recompute"
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        stayed, steps = gpt(30, 1, *plain, name="stayed"), gpt(10, 1, *plain)
    steps |= gpt(20, 1, *plain)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    steps |= gpt(30, 1, *plain)
    assert len(steps) == 3 and steps == pytest.approx(stayed, rel=CLOSE)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_a_timeline_of_the_gpus_clocks_is_in_order(trained, tmp_path, schedule):
    """CUDA events: operations of a rank do not overlap, and none is longer than its step."""
    trained("pipeline", 2, "--schedule", schedule, "--timeline")
    for rank in range(2):
        steps = json.loads((tmp_path / f"out/timeline-rank{rank}.json").read_text())["steps"]
        for step in steps:
            work = sorted(
                (event["start"], event["end"]) for event in step["events"] if event["kind"] in "FB"
            )
            assert work and all(start <= end for start, end in work)
            assert all(before[1] <= after[0] + 1e-4 for before, after in itertools.pairwise(work))
            assert step["start"] - 1e-4 <= work[0][0] and work[-1][1] <= step["end"] + 1e-4

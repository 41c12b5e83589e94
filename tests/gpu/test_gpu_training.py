"""Whole runs on GPUs by the command line: every rung and precision, resumed across devices, memory, timelines."""

import gzip
import itertools
import json
import re

import pytest
from conftest import ON_CPU
from test_training import losses, summary

CLOSE = 1e-3  # of losses after some steps on a GPU and on a CPU, which add in another order
RUNGS = ["single", "data_parallel", "ddp", "fsdp", "tensor", "model_parallel", "pipeline"]
OPTIONS = [["--precision", "bf16"], ["--compile"]]


@pytest.fixture
def trained(run_once, tmp_path):
    """Train for some steps by ``python -m mpdemo train``; returns the losses by step, and the summary."""

    def train(*words, out="out", steps=4, model="transformer", **environment):
        folder = tmp_path / out
        options = ["--steps", steps, "--batch-size", 64, "--log-every", 1, "--out", folder, "--workers", 1, *words]
        done = run_once("-m", "mpdemo", "train", "--model", model, *map(str, options), timeout=300, **environment)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return losses(folder), summary(folder)

    return train


def per_device(rung, count):
    """The options that run a rung on `count` GPUs."""
    if rung in ("model_parallel", "pipeline") and count < 2:
        pytest.skip(f"needs 2 GPUs, {count} here")
    more = {"single": [], "data_parallel": ["--devices", count]}
    return ["--rung", rung, *more.get(rung, ["--form", "per-device", "--processes", count])]


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_trains_and_validates(trained, rung, count):
    steps, end = trained(*per_device(rung, count))
    assert len(steps) == 4 and all(0 < loss < 10 for loss in steps.values())
    assert 0 < end["validation_loss"] < 10
    assert (end["environment"]["device"] == "cpu core") == ON_CPU
    one = rung == "single" or (ON_CPU and rung == "data_parallel")
    assert len(end["peak_memory_mib"]) == (1 if one else count) and min(end["peak_memory_mib"]) > 0
    assert ON_CPU or "nccl" in end["environment"]["backend"]
    busy = end["busy"]
    assert 0 < busy["mfu"] < 1.5 and len(busy["utilisation"] or range(count)) in (1, count), busy


def test_a_profile_shows_kernels_and_memory(trained, tmp_path):
    trained("--rung", "single", "--profile", 2, out="profiled")
    events = json.loads(gzip.decompress((tmp_path / "profiled/trace-rank0.json.gz").read_bytes()))["traceEvents"]
    assert ON_CPU or any(event.get("cat") == "kernel" for event in events)
    assert ON_CPU or (tmp_path / "profiled/memory-rank0.pickle").stat().st_size > 1000


def test_each_rank_says_where_it_is(run_once, count):
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "mpdemo", "env")
    said = run_once(*words, timeout=300).stdout
    assert "one row per rank" in said and "a GPU per rank" not in said, said
    assert ON_CPU or count < 2 or re.search(r" nccl +(P2P|SHM|NET)", said), said


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("rung", ["single", "ddp"])
def test_every_precision_trains(trained, rung, options, count):
    steps, _ = trained(*per_device(rung, count), *options, model="convnet")
    assert all(0 < loss < 10 for loss in steps.values())


def test_a_checkpoint_goes_from_cpu_to_gpu_and_back(trained, tmp_path):
    """The losses are those of a training run that stayed on the CPU."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    single = ["--rung", "single", "--checkpoint-every", "2"]
    stayed, _ = trained(*single, out="stayed", steps=6, **hidden)
    steps, _ = trained(*single, out="first", steps=2, **hidden)
    for name, before, stop, environment in [("second", "first", 4, {}), ("third", "second", 6, hidden)]:
        more, _ = trained(*single, "--resume", tmp_path / before, out=name, steps=stop, **environment)
        steps |= more
    assert steps == pytest.approx(stayed, rel=CLOSE)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_a_timeline_of_the_gpus_clocks_is_in_order(trained, tmp_path, schedule):
    """CUDA events: operations of a rank do not overlap, and none is longer than its step."""
    trained("--rung", "pipeline", "--processes", 2, "--schedule", schedule, "--microbatches", 4, "--timeline")
    for rank in range(2):
        steps = json.loads((tmp_path / f"out/timeline-rank{rank}.json").read_text())["steps"]
        for step in steps:
            work = sorted((event["start"], event["end"]) for event in step["events"] if event["kind"] in "FB")
            assert work and all(start <= end for start, end in work)
            assert all(before[1] <= after[0] + 1e-4 for before, after in itertools.pairwise(work))
            assert step["start"] - 1e-4 <= work[0][0] and work[-1][1] <= step["end"] + 1e-4

"""Utilisation, FLOPs and MFU of a run against what arithmetic says; the traces of --profile."""

import gzip
import json

import pytest
import torch
from test_training import lines, run_here, summary
from torch.utils.flop_counter import FlopCounterMode

from mpdemo import data, models
from mpdemo.settings import Settings, checked
from mpdemo.training.utilisation import flops_of_step

TOY = [784 * 32, 32 * 32, 32 * 32, 32 * 10]  # weights of its layers


def flops(**settings):
    return flops_of_step(checked(Settings(rung="single", **settings)), data.load("digits"))


def test_the_operations_of_a_step_are_those_that_one_counts_by_hand():
    """Two for each weight and image, forward, for the gradient of the weights, and for that of the inputs."""
    assert flops(model="toy", batch_size=64) == 2 * 64 * (3 * sum(TOY) - TOY[0])
    course = models.build("transformer")
    tokens, width = course.get_submodule(course.names[0])(torch.zeros(1, 1, 28, 28)).shape[1:]
    blocks = sum(name.startswith("block") for name in course.names)
    with FlopCounterMode(display=False) as linear:  # a real pass; on CPUs the counter does not see its attention
        course(torch.randn(4, 1, 28, 28)).sum().backward()
    attention = 3 * 2 * 2 * 4 * tokens**2 * width * blocks  # queries by keys, weights by values
    assert flops(model="transformer", batch_size=4) == linear.get_total_flops() + attention


def test_a_run_says_how_busy_its_core_was(tmp_path, capsys):
    out = run_here(tmp_path / "run", model="toy", batch_size=512, steps=6, log_every=1)
    busy, step = summary(out)["busy"], lines(out, "step")[2]
    (share,), mfu = busy["utilisation"], busy["mfu"]
    assert 0.05 < share < 1.2 and 0 < mfu < 1
    assert busy["flops_per_step"] == flops(batch_size=512, model="toy")
    assert busy["peak_from"] == "measured matrix product, fp32"
    rate = step["images_per_second"] / 512 * busy["flops_per_step"]
    assert step["mfu"] == pytest.approx(rate / busy["peak_flops_per_device"], abs=1e-3)
    said = capsys.readouterr().out
    assert f"The CPU core was busy {share:.0%} of the time and reached {mfu:.1%} of the peak" in said
    assert "This run used no GPU, so GPU utilisation and GPU memory are not measured." in said


@pytest.mark.nightly
def test_profile_writes_a_trace_of_each_rank_with_the_steps_that_were_asked_for(tmp_path, run_mpdemo):
    out = tmp_path / "two"
    words = ["--model", "toy", "--steps", "6", "--out", str(out), "--profile", "3"]
    done = run_mpdemo("train", "--rung", "ddp", "--processes", "2", *words)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((out / f"trace-rank{rank}.json.gz").read_bytes()))
        names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
        steps = {name for name in names if name.startswith("ProfilerStep#")}
        assert steps == {f"ProfilerStep#{number}" for number in (2, 3, 4)} and "aten::addmm" in names
    assert len(summary(out)["busy"]["utilisation"]) == 2
    run_here(out, model="toy", batch_size=512, steps=1)
    assert summary(out)["busy"]["mfu"] is None  # its only step warms up
    assert not list(out.glob("trace-*"))  # of the run before

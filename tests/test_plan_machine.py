"""``plan --cost measure``: times of this machine's devices, measured by processes of their own; none is asserted."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mpdemo.__main__ import main
from mpdemo.errors import UserError
from mpdemo.plan import machine, planner, roofline
from mpdemo.plan.command import plan
from mpdemo.plan.footprint import footprints
from mpdemo.world.launch import PARENT

SMALL = {"channels": 1, "classes": 10, "image_size": 28, "batch": 8}
QUESTION = {"image_size": 28, "classes": 10, "channels": 1, "norm": "batch", "optimizer": "sgd", "budget": 10.0}


@pytest.fixture(scope="module")
def planned():
    result = plan(model="convnet", schedule="1f1b", microbatches=2, optimizer="adamw", **SMALL)
    assert PARENT not in os.environ  # a notebook's kernel plans, too, and starts other things afterwards
    return result


def test_the_stages_are_measured_on_all_devices_at_once(planned):
    assert planned.measured_on == 2
    job = planned.job
    assert set(job.costs) == {4, 8} and [len(row) for row in job.costs.values()] == [len(job.blocks)] * 2
    assert min(job.update, job.latency, 1 / job.bandwidth) > 0
    assert planned.best.update == job.update * max(device.weights for device in planned.best.devices)


def test_with_few_devices_one_is_measured_and_no_message(monkeypatch):
    asked = []
    answer = {"devices": 1, "costs": {}, "update": 1e-9}
    monkeypatch.setattr(machine, "devices_here", lambda: 3)
    monkeypatch.setattr(machine, "ask", lambda lab, request, n, **question: asked.append(n) or dict(answer))
    for devices in (3, 4):
        speeds = machine.measured(None, [4], devices).speeds()
    assert asked == [3, 1]
    assert "bandwidth" not in speeds  # that of a Workload stays


def test_a_step_ends_with_the_update_of_the_largest_stage():
    blocks, costs = footprints("resnet18", 64), roofline.estimate("resnet18", [8, 32], 64, "v100")
    job = planner.Workload(blocks, costs, ranks=2, batch=32)
    free = planner.evaluate(job, "1f1b", 4, [5])
    slow = planner.evaluate(replace(job, update=1e-6), "1f1b", 4, [5])
    weights = max(sum(block.weights for block in part) for part in (blocks[:5], blocks[5:]))
    assert slow.step_time == pytest.approx(free.step_time + 1e-6 * weights)
    whole = planner.one_device_step_time(replace(job, update=1e-6)) - planner.one_device_step_time(job)
    assert whole == pytest.approx(1e-6 * sum(block.weights for block in blocks))


def test_every_strategy_that_can_be_is_predicted_from_what_is_measured(capsys):
    words = "plan --model convnet --channels 1 --classes 10 --image-size 28 --batch 8 --devices 2 --gpu-memory 2GiB"
    assert main([*words.split(), "--optimizer", "adamw", "--cost", "measure"]) == 0
    out = capsys.readouterr().out
    assert "steps predicted from what was measured here" in out
    lines = [line.removeprefix("->").split("  ") for line in out.splitlines() if " yes " in line]
    steps = {next(filter(None, line)).strip(): line[-1].strip().endswith("%") for line in lines}
    assert steps.pop("ddp, bf16") is False
    assert {"ddp", "fsdp", "pipeline", "model_parallel"} <= steps.keys() and all(steps.values()), out
    assert "train --model convnet --rung ddp --optimizer adamw --batch-size 8" in out


def test_more_devices_than_there_are_cannot_be_measured(monkeypatch, capsys):
    monkeypatch.setattr(machine, "devices_here", lambda: 4)
    words = "plan --model convnet --image-size 28 --batch 8 --devices 8 --gpu-memory 2GiB --cost measure"
    assert main(words.split()) == 2
    assert capsys.readouterr().err == (
        "mpdemo: error: --cost measure --devices 8: this machine has 4; allowed: --devices 4, or a data sheet such as "
        "--cost v100\n"
    )


def test_a_lab_that_fails_or_hangs_is_one_line(monkeypatch):
    request = SimpleNamespace(model="resnet19", **QUESTION)
    with pytest.raises(UserError, match=r"^--cost measure failed: .*Error.*; try --cost v100$") as refusal:
        machine.ask("mpdemo.labs.machine", request, 1, sizes=[2])
    assert "\n" not in str(refusal.value)
    monkeypatch.setattr(machine, "PATIENCE", 0.0)
    with pytest.raises(UserError, match="did not end within 0 s"):
        machine.ask("mpdemo.labs.machine", SimpleNamespace(model="convnet", **QUESTION | {"budget": 0.1}), 1, sizes=[2])

"""``plan --cost measure``: times of this machine's devices, measured by processes of their own; none is asserted."""

import os
import re
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from mpdemo.__main__ import main
from mpdemo.errors import RunFailed
from mpdemo.plan import cost, fit, machine, planner
from mpdemo.plan.case import Case
from mpdemo.plan.command import plan
from mpdemo.plan.footprint import estimate, footprints
from mpdemo.world.launch import ERRORS

SMALL = {"channels": 1, "classes": 10, "image_size": 28, "batch": 8}
QUESTION = {"image_size": 28, "classes": 10, "channels": 1, "norm": "batch", "optimizer": "sgd", "budget": 10.0}
QUESTION |= {"input": None, "tokens": False}

OWN = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.flat, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 10)

    def forward(self, x):
        return self.linear(self.flat(self.conv(x).relu()))


class Real(nn.Linear):
    def forward(self, x):
        assert type(x).__name__ == "FakeTensor"
        return super().forward(x)


def model(): return Model()
def uncut(): return nn.Linear(8, 2)
def real(): return nn.Sequential(Real(8, 2))
"""


@pytest.fixture(scope="module", autouse=True)
def on_cpu_cores():
    """The tests hide all GPUs, which were counted before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "gpus_here", lambda: 0)
        yield


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A model that is traced, in the current folder; its first block ends in a view, as Flatten makes one."""
    (tmp_path / "traced_views.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "traced_views:model"


@pytest.fixture(scope="module")
def planned():
    result = plan(model="convnet", schedule="1F1B", microbatches=2, optimizer="adamw", **SMALL)
    assert ERRORS not in os.environ  # a notebook's kernel plans, too, and starts other things afterwards
    return result


def test_the_stages_are_measured_on_all_devices_at_once(planned):
    assert planned.measured_on == 2
    job = planned.job
    assert set(job.costs) == {4, 8} and [len(row) for row in job.costs.values()] == [len(job.blocks)] * 2
    assert min(job.update, job.latency, 1 / job.bandwidth) > 0
    assert planned.best.step_time > planned.best.simulation.step_time


def test_with_few_devices_one_is_measured_and_no_message(monkeypatch):
    asked = []
    answer = {"devices": 1, "costs": {}, "update": 1e-9}
    monkeypatch.setattr(machine, "devices_here", lambda: 3)
    monkeypatch.setattr(machine, "ask", lambda request, n, **question: asked.append(n) or dict(answer))
    for devices in (3, 4):
        speeds = machine.measured(None, [4], devices).speeds()
    assert asked == [3, 1]
    assert "bandwidth" not in speeds  # that of a Workload stays


def test_a_step_ends_with_the_update_of_the_largest_stage():
    blocks, costs = footprints("resnet18", 64), estimate("resnet18", [8, 32], 64, "v100")
    job = planner.Workload(blocks, costs, ranks=2, batch=32)
    free = planner.evaluate(job, "1F1B", 4, [5])
    slow = planner.evaluate(replace(job, update=1e-6), "1F1B", 4, [5])
    weights = max(sum(block.weights for block in part) for part in (blocks[:5], blocks[5:]))
    assert slow.step_time == pytest.approx(free.step_time + 1e-6 * weights)
    whole = planner.one_device_step_time(replace(job, update=1e-6)) - planner.one_device_step_time(job)
    assert whole == pytest.approx(1e-6 * sum(block.weights for block in blocks))


def test_every_strategy_that_can_be_is_predicted_from_what_is_measured(capsys):
    words = "plan --model convnet --channels 1 --classes 10 --image-size 28 --batch 8 --devices 2 --gpu-memory 2GiB"
    assert main([*words.split(), "--optimizer", "adamw", "--cost", "measure"]) == 0
    out = capsys.readouterr().out
    assert "steps of each strategy measured on 2 CPU cores of this machine in float32" in out
    lines = [line.removeprefix("->").split("  ") for line in out.splitlines() if " yes " in line]
    steps = {next(filter(None, line)).strip(): line[-1].strip().endswith("%") for line in lines}
    assert {"ddp", "fsdp", "pipeline", "model_parallel"} <= steps.keys() and all(steps.values()), out
    assert "train --model convnet --rung ddp --optimizer adamw --batch-size 8" in out


def test_an_own_model_is_measured_block_by_block(own_model, capsys):
    words = "--batch 16 --devices 2 --gpu-memory 2GiB --optimizer adamw --cost measure --input 3,8,8 --model"
    assert main(["plan", *words.split(), own_model]) == 0
    out = capsys.readouterr().out
    assert "this machine in float32: blocks in batches of up to 16, the bytes of messages, none hidden, and the" in out
    for strategy in ("ddp", "fsdp", "pipeline"):
        line = next(line for line in out.splitlines() if re.match(rf"(->)? +{strategy} +yes ", line))
        assert float(line.split()[-2]) > 0 and line.endswith("%"), line


def test_a_model_that_stays_one_block_is_measured(own_model):
    request = SimpleNamespace(**QUESTION | {"model": own_model.replace("model", "uncut"), "input": "8"})
    here = machine.measured(request, [2, 8], 1)
    assert [len(blocks) for blocks in here.costs.values()] == [1, 1] and here.update > 0


def test_a_readers_error_is_one_line_without_a_word_of_ours(own_model, capsys):
    words = "plan --batch 8 --devices 1 --gpu-memory 2GiB --cost measure --input 8 --model"
    assert main([*words.split(), own_model.replace("model", "real")]) == 2
    assert capsys.readouterr().err == (
        "mpdemo: error: --model traced_views:real does not compute a batch of 2 (AssertionError)\n"
    )


def test_measured_costs_messages_and_the_update_make_the_steps():
    block = cost.BlockCost(1.0, 2.0, 1.0, 1.0)
    blocks = footprints("convnet", 28, classes=10, channels=1)
    costs = {size: [block] * len(blocks) for size in (2, 8)}
    here = machine.Machine(2, costs, update=1e-6, per_byte=1e-3)
    case = Case("convnet", batch=8, devices=2, image_size=28, classes=10, channels=1, machine=here)
    updated = 1e-6 * sum(b.weights for b in blocks)
    assert case.link == pytest.approx(1e3)
    assert fit.replicas(case).seconds == pytest.approx(3 * len(blocks) + updated)
    assert fit.replicas(case, (2,), activation_checkpointing=True).seconds == pytest.approx(
        2 * 4 * len(blocks) + updated
    )
    assert fit.sharded(case).seconds == pytest.approx(3 * len(blocks) + updated / 2)
    assert fit.cut(case, 1).seconds > 3 * len(blocks) + updated / 2  # the stage with the most weights


def test_more_devices_than_there_are_cannot_be_measured(monkeypatch, capsys):
    monkeypatch.setattr(machine, "devices_here", lambda: 4)
    words = "plan --model convnet --image-size 28 --batch 8 --devices 8 --gpu-memory 2GiB --cost measure"
    assert main(words.split()) == 2
    assert capsys.readouterr().err == (
        "mpdemo: error: --cost measure --devices 8: this machine has 4; allowed: --devices 4, or a data sheet such as "
        "--cost v100\n"
    )


def test_what_has_no_room_on_this_machine_is_not_measured(monkeypatch, capsys):
    """Two cores share the memory of their machine; the times are then those of a data sheet, and it is said."""
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**22))
    monkeypatch.setattr(machine, "devices_here", lambda: 2)
    monkeypatch.setattr(machine, "ask", None)
    words = "plan --model convnet --image-size 28 --batch 64 --devices 2 --gpu-memory 16GiB --cost measure"
    assert main(words.split()) == 0
    assert "(times estimated for a a100" in capsys.readouterr().out


def test_what_this_machine_cannot_measure_is_refused_in_one_line(capsys):
    words = "plan --image-size 28 --batch 8 --devices 2 --gpu-memory 2GiB --cost measure"
    for wrong, said in (
        ("--nodes 2", "--cost measure measures in one node, not in --nodes 2; allowed: --cost v100"),
        ("--budget inf", "--budget inf is not allowed; allowed: 86400.0 or less"),
    ):
        assert main([*words.split(), *wrong.split()]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err


def test_a_lab_that_fails_is_one_line():
    with pytest.raises(RunFailed) as failure:
        wrong = SimpleNamespace(model="convnet", **QUESTION | {"optimizer": "rmsprop"})
        machine.ask(wrong, 1, sizes=[2])
    assert re.fullmatch(r"--cost measure failed: KeyError: 'rmsprop'; --cost v100 needs no m\w+", str(failure.value))


def test_a_lab_that_does_not_end_is_ended_with_its_ranks(monkeypatch, tmp_path):
    slow = SimpleNamespace(model="resnet101", **QUESTION | {"image_size": 224, "channels": 3, "budget": 6.0})
    monkeypatch.setattr(machine, "PATIENCE", 2.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RunFailed, match="did not end within 8 s"):
        machine.ask(slow, 2, sizes=[64])
    end = time.monotonic() + 10
    while (ranks := ranks_in(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not ranks


def ranks_in(folder):
    """The processes of this machine that were given a folder, or one in it."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]

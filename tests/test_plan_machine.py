"""``plan --cost measure``: times of this machine's devices, measured by processes of their own; none is asserted."""

import re
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from test_plan_own_models import FILE

from mpdemo.__main__ import main
from mpdemo.errors import RunFailed
from mpdemo.plan import advice
from mpdemo.plan.command import Request
from mpdemo.plan.subject import Subject, settled

QUESTION = Request(model="convnet", channels=1, classes=10, devices=2, budget=6.0)
STEP = settled(Subject("convnet", 28, 10, 1), "ddp", 8, 2)
SPEEDUP = re.compile(r"\d+\.\d\d")  # over one device


@pytest.fixture(scope="module", autouse=True)
def on_cpu_cores():
    """The tests hide all GPUs, which were counted before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "gpus_here", lambda: 0)
        yield


def test_every_strategy_that_can_be_is_predicted_from_what_is_measured(capsys):
    words = "plan --model convnet --channels 1 --classes 10 --image-size 28 --batch 8 --devices 2 --gpu-memory 2GiB"
    assert main([*words.split(), "--optimizer", "adamw", "--cost", "measure"]) == 0
    out = capsys.readouterr().out
    assert "steps of each strategy measured on 2 CPU cores of this machine;" in out
    lines = [line.removeprefix("->").split("  ") for line in out.splitlines() if " yes " in line]
    steps = {next(filter(None, line)).strip(): SPEEDUP.fullmatch(line[-1].strip()) for line in lines}
    assert {"ddp", "fsdp", "pipeline", "model_parallel"} <= steps.keys() and all(steps.values()), out
    assert "train --model convnet --rung ddp --optimizer adamw --batch-size 8" in out


def test_the_steps_of_an_own_model_are_measured(capsys):
    words = "--batch 16 --devices 2 --gpu-memory 2GiB --optimizer adamw --cost measure --input 8 --model"
    assert main(["plan", *words.split(), f"{FILE}:Alike"]) == 0
    out = capsys.readouterr().out
    assert "steps of each strategy measured on 2 CPU cores of this machine;" in out
    for strategy in ("ddp", "fsdp", "pipeline", "model_parallel"):
        line = next(line for line in out.splitlines() if re.match(rf"(->)? +{strategy} +yes ", line))
        assert float(line.split()[-2]) > 0 and SPEEDUP.fullmatch(line.split()[-1]), line


def test_a_readers_error_is_one_line_without_a_word_of_ours(capsys):
    words = "plan --batch 8 --devices 1 --gpu-memory 2GiB --cost measure --input 8 --model"
    assert main([*words.split(), f"{FILE}:real"]) == 2
    said = f"--model {FILE}:real does not compute with --rung single (AssertionError)"
    assert capsys.readouterr().err == f"mpdemo: error: {said}\n"


def test_more_devices_than_there_are_cannot_be_measured(monkeypatch, capsys):
    monkeypatch.setattr(advice, "devices_here", lambda: 4)
    words = "plan --model convnet --image-size 28 --batch 8 --devices 8 --gpu-memory 2GiB --cost measure"
    assert main(words.split()) == 2
    assert capsys.readouterr().err == (
        "mpdemo: error: --cost measure --devices 8: this machine has 4; allowed: --devices 4, or a data sheet such as "
        "--cost v100\n"
    )


def test_what_has_no_room_on_this_machine_is_not_measured(monkeypatch, capsys):
    """Two cores share the memory of their machine; the times are then those of a data sheet, and it is said."""
    monkeypatch.setattr(advice.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**22))
    monkeypatch.setattr(advice, "devices_here", lambda: 2)
    monkeypatch.setattr(advice, "measured_steps", None)
    words = "plan --model convnet --image-size 28 --batch 64 --devices 2 --gpu-memory 16GiB --cost measure"
    assert main(words.split()) == 0
    assert "(times estimated for the a100" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--stages 2", "--devices 2 --nodes 2 --gpu-memory 2GiB"])
def test_what_this_machine_cannot_measure_is_refused_in_one_line(wrong, capsys):
    assert main(["plan", "--image-size", "28", "--cost", "measure", *wrong.split()]) == 2
    said = "--cost measure measures steps in one node, with --devices; allowed: --cost v100"
    assert capsys.readouterr().err == f"mpdemo: error: {said}\n"


def test_a_measurement_that_fails_is_one_line():
    with pytest.raises(RunFailed) as failure:
        advice.measured_steps(SimpleNamespace(**vars(QUESTION) | {"classes": 0}), [STEP])
    assert re.fullmatch(
        r"--cost measure failed: a rank failed: \w+: .+; --cost v100 needs no measuring", str(failure.value)
    )


def test_a_measurement_that_does_not_end_is_ended_with_its_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(advice, "PATIENCE", 2.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RunFailed, match="did not end within 8 s"):
        advice.measured_steps(QUESTION, [replace(STEP, model="resnet101", image_size=224, batch_size=64)])
    end = time.monotonic() + 10
    while (ranks := ranks_in(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not ranks


def ranks_in(folder):
    """The processes of this machine that were given a folder, or one in it."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]

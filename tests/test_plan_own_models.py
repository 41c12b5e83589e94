"""Models of readers, built as people build them: what is counted of each, into how many blocks, and what is said."""

import sys

import pytest
from programs.foreign_models import Alike
from project import root

from mpdemo.errors import UserError
from mpdemo.models import Blocks
from mpdemo.models.own import OwnModel
from mpdemo.plan import memory, meter
from mpdemo.plan.footprint import footprints
from mpdemo.plan.request import ModelSpec, PlanRequest, settled
from mpdemo.plan.strategies import compare

RESNET18 = 11_689_512
FOREIGN = [  # function, shape of a sample, parameters that train, bytes of each, what is said of it
    ("asks_while_built", "3,16,16", 12_218, 4, ""),
    ("orthogonal", "64", 4_810, 4, ""),
    ("NamedMean", "3,32,32", 898, 4, ""),
    ("Tied", "64", 153_216, 4, "embed.weight and head.weight are one parameter"),
    ("frozen_backbone", "3,64,64", 5_130, 4, ""),
    ("checkpointed", "3,16,16", 37_738, 4, ""),
    ("lazy", "3,32,32", 144_458, 4, ""),
    ("in_place_first", "3,32,32", 72_234, 4, ""),
    ("on_meta", "3,64,64", RESNET18, 4, ""),
    ("dict_chain", "3,16,16", 12_218, 4, ""),
    ("double", "512", 525_312, 8, ""),
    ("Unused", "64", 8_320, 4, "no gradient reaches unused.weight, unused.bias"),
    ("two_inputs", None, 97_602, 4, ""),
    ("TwoOutputs", "8", 288, 4, ""),
    ("compiled", "3,64,64", RESNET18, 4, ""),
    ("bf16", "3,64,64", RESNET18, 2, ""),
]
FILE = f"{root()}/tests/programs/foreign_models.py"
SCRIPT = """
import argparse, sys
from torch import nn
print("noise")
def net():
    print("noise")
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
argparse.ArgumentParser().parse_args()
sys.exit(3)
"""


def own(function, shape):
    shape = shape and tuple(map(int, shape.split(",")))
    return OwnModel(f"{FILE}:{function}", shape, tokens=function in ("Tied", "words"))


def counted(model, rung="ddp", batch=8, devices=2, **more):
    spec = ModelSpec(model, 0)
    return memory.processes(spec, settled(spec, rung, batch, devices, **more), states=0)[0]


@pytest.mark.parametrize(("function", "shape", "parameters", "size", "words"), FOREIGN, ids=str)
def test_any_module_is_counted_as_pytorch_counts_it(function, shape, parameters, size, words):
    model = own(function, shape)
    found = counted(model)
    assert found.devices[0].gradients == found.messages["all-reduce"] == parameters * size
    assert counted(model, "fsdp").devices[0].peak > 0
    (block,) = footprints(ModelSpec(model))
    assert block.parameters >= parameters and block.bytes("saved", 8) > 0  # the frozen ones count, too
    assert words in "; ".join(model.notes)


def test_a_model_that_checkpoints_its_layers_needs_less():
    kept, twice = (counted(own(name, "3,64,64")).devices[0].activations for name in ("kept", "checkpointed"))
    assert twice < 0.6 * kept
    again = counted(own("kept", "3,64,64"), activation_checkpointing=True).devices[0].activations
    assert again < 0.6 * kept


def test_a_scripted_module_is_refused_in_one_line():
    with pytest.raises(UserError, match="scripted module, whose code cannot be followed") as refusal:
        own("scripted", "3,64,64")
    assert "\n" not in str(refusal.value)


def test_a_file_that_prints_reads_arguments_and_ends_itself_is_planned(tmp_path, capfd):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments, path = list(sys.argv), list(sys.path)
    assert OwnModel(f"{tmp_path}/script.py:net", (8,)).template.layers == ["0", "1"]
    assert capfd.readouterr() == ("", "") and sys.argv == arguments and sys.path == path


def test_a_strategy_in_which_a_model_fails_is_one_that_cannot_be_and_a_note_says_why():
    model = own("GrowingList", "8")
    rows = {row.answer: row.predicted for row in compare(PlanRequest(model, batch=8, devices=2))}
    assert rows["ddp, activation checkpointing"] is None and rows["ddp"] is not None
    assert any(note.startswith("ddp, activation checkpointing: its own code fails there (") for note in model.notes)


def test_equal_blocks_are_measured_once(monkeypatch):
    def alike():
        layers = Alike()
        return Blocks({"first": layers.first, **{f"layers.{n}": layer for n, layer in enumerate(layers.layers)}})

    blocks = alike()
    signatures = [meter.signature(blocks.stage(number, number + 1)) for number in range(len(blocks))]
    assert [signatures.index(signature) for signature in signatures] == [0, 1, 1, 3, 4, 1]
    once = footprints(ModelSpec(alike, 8))
    monkeypatch.setattr(meter, "signature", id)
    one_by_one = footprints(ModelSpec(lambda: alike(), 8))
    for block, other in zip(once, one_by_one, strict=True):
        assert block.bytes("saved", 4) == other.bytes("saved", 4) and block.parameters == other.parameters


def test_a_model_that_is_larger_than_this_machine_takes_no_memory():
    (huge,) = footprints(ModelSpec(own("huge", str(2**16))))
    assert huge.weights > 64 * 2**30


def test_a_model_that_cannot_be_planned_is_refused_in_one_line(capfd):
    for function, shape, words in (
        ("branch", "8", "asks for values"),
        ("masked", "8", "asks for values"),
        ("needs_one", "8", "allowed: a function without arguments"),
        ("empty", "8", "no parameters to train"),
        ("number", "8", "returns int; allowed: a torch.nn.Module"),
        ("checkpointed", "4,8,8", "does not compute samples of shape (4, 8, 8)"),
        ("nothing", "8", "cannot be imported"),
    ):
        with pytest.raises(UserError) as refusal:
            own(function, shape)
        assert words in str(refusal.value) and "\n" not in str(refusal.value), refusal.value
    assert capfd.readouterr() == ("", "")


def test_the_command_line_plans_an_own_model(run_mpdemo):
    limits = ("--devices", "2", "--batch", "16", "--gpu-memory", "769MiB")
    done = run_mpdemo("plan", "--model", f"{FILE}:words", "--input", "6", "--tokens", *limits)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ddp: Each of 2 devices") and "scripts/train_ddp.py" in done.stdout
    assert "note: a model of your own isn't split, so tensor parallelism and pipelines are left out" in done.stdout
    rows = {line.removeprefix("->").split()[0].rstrip(",") for line in done.stdout.splitlines() if " yes " in line}
    assert rows == {"ddp", "fsdp"}
    for wrong, words in (
        (("--model", f"{FILE}:words"), "needs --input"),
        (("--input", "6"), "is for a model of your own"),
        (("--model", "resnet10"), "did you mean 'resnet101'?"),
        (("--model", f"{FILE}:words", "--input", "3,x"), "allowed: whole numbers above 0"),
    ):
        done = run_mpdemo("plan", *wrong, *limits)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr

"""Models of readers, built as people build them: what is counted of each, into how many blocks, and what is said."""

import sys

import pytest
from project import root

from mpdemo.errors import UserError
from mpdemo.models.own import OwnModel
from mpdemo.plan import memory
from mpdemo.plan.case import Case
from mpdemo.plan.memory import Subject, settled
from mpdemo.plan.strategies import compare

RESNET18 = 11_689_512
FOREIGN = [  # function, shape of a sample, parameters that train, bytes of each, blocks, what is said of it
    ("asks_while_built", "3,16,16", 12_218, 4, 7, ""),
    ("orthogonal", "64", 4_810, 4, 2, ""),
    ("named_mean", "3,32,32", 898, 4, 1, "it cannot be cut before first"),
    ("tied", "64", 153_216, 4, 1, "embed.weight and head.weight are one parameter"),
    ("frozen_backbone", "3,64,64", 5_130, 4, 1, ""),
    ("checkpointed", "3,16,16", 37_738, 4, 18, ""),
    ("lazy", "3,32,32", 144_458, 4, 2, ""),
    ("in_place_first", "3,32,32", 72_234, 4, 2, ""),
    ("on_meta", "3,64,64", RESNET18, 4, 11, ""),
    ("dict_chain", "3,16,16", 12_218, 4, 7, ""),
    ("double", "512", 525_312, 8, 2, ""),
    ("unused_head", "64", 8_320, 4, 1, "no gradient reaches unused.weight, unused.bias"),
    ("two_inputs", None, 97_602, 4, 1, "takes several inputs"),
    ("two_outputs", "8", 288, 4, 1, "it cannot be cut before aux"),
    ("compiled", "3,64,64", RESNET18, 4, 11, ""),
    ("bf16", "3,64,64", RESNET18, 2, 11, ""),
]
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
    return OwnModel(f"{root()}/tests/programs/foreign_models.py:{function}", shape, tokens=function == "tied")


def counted(model, rung="ddp", batch=8, devices=2, **more):
    subject = Subject(model, 0)
    return memory.processes(subject, settled(subject, rung, batch, devices, **more), states=0)[0]


@pytest.mark.parametrize(("function", "shape", "parameters", "size", "blocks", "words"), FOREIGN, ids=str)
def test_any_module_is_counted_as_pytorch_counts_it(function, shape, parameters, size, blocks, words):
    model = own(function, shape)
    found = counted(model)
    assert found.devices[0].gradients == found.messages["all-reduce"] == parameters * size
    assert counted(model, "fsdp").devices[0].peak > 0
    assert len(model.at(2)) == blocks
    assert words in "; ".join([model.uncut, *model.notes])


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
    assert OwnModel(f"{tmp_path}/script.py:net", (8,)).at(2).names == ["0", "1"]
    assert capfd.readouterr() == ("", "") and sys.argv == arguments and sys.path == path


def test_a_strategy_in_which_a_model_fails_is_one_that_cannot_be_and_a_note_says_why():
    model = own("growing_list", "8")
    rows = {row.answer: row.predicted for row in compare(Case(model, batch=8, devices=2))}
    assert rows["ddp, activation checkpointing"] is None and rows["ddp"] is not None
    assert any(note.startswith("ddp, activation checkpointing: its own code fails there (") for note in model.notes)

"""Models of readers, built as people build them: what is counted of each, into how many blocks, and what is said."""

import json
import re
import sys

import pytest
from project import root

from mpdemo.__main__ import main
from mpdemo.errors import UserError
from mpdemo.models.own import OwnModel
from mpdemo.plan import own
from mpdemo.plan.command import PlanOptions, answer
from mpdemo.plan.request import ALL, BOTH, RESERVE, NotPlanned, PlanRequest
from mpdemo.plan.strategies import compare, table

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
STYLES = [  # function, shape of a sample (t: of tokens), whether it returns its own loss
    ("Detector", "3,64,64", False),
    ("Queries", "3,64,64", False),
    ("Unet", "3,32,32", False),
    ("diffusion", "3,32,32", True),
    ("Segmentation", "3,32,32", False),
    ("mixture_in_a_row", "6,16", False),
    ("ExpertsInTurn", "16t", False),
    ("Moco", "3,4,4", False),
    ("recommender", None, False),
    ("Autoencoder", "3,4,4", False),
    ("Rivals", "3,4,4", True),
    ("Recurrent", "6t", False),
    ("Speech", "8,20", False),
    ("graph", None, False),
    ("Vit", "3,64,64", False),
    ("Gpt", "16t", False),
    ("gpt_with_targets", None, True),
    ("triplet", None, True),
    ("Fourier", "3,16,16", False),
    ("Density", "8", False),
    ("Scan", "6,8", False),
    ("Adapters", "32", False),
    ("OnAGpu", "64", False),
    ("read_small", "64", False),
]
PROGRAMS = f"{root()}/tests/programs"
FILE = f"{PROGRAMS}/foreign_models.py"
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


def made(function, shape, file=FILE):
    tokens = function in ("Tied", "words") or bool(shape and shape.endswith("t"))
    return OwnModel(f"{file}:{function}", shape and tuple(map(int, shape.rstrip("t").split(","))), tokens)


def request(model, batch=8, devices=2, **more):
    return PlanRequest(model, batch, devices, optimizer="sgd", **more)


def step(model, **way):
    return own.steps_of(request(model), 4, **way).at(4)


@pytest.mark.parametrize(("function", "shape", "parameters", "size", "words"), FOREIGN, ids=str)
def test_any_module_is_counted_as_pytorch_counts_it(function, shape, parameters, size, words):
    model = made(function, shape)
    ddp = own.replicated(request(model))
    assert model.trained == step(model).trained == parameters * size
    assert ddp.sent == pytest.approx(step(model).trained + step(model).buffers / 2)
    assert ddp.memory - step(model).peak == model.trained  # DDP's buckets
    assert own.sharded(request(model)).memory > 0
    assert words in "; ".join(model.notes)


@pytest.mark.parametrize(("function", "shape", "own_loss"), STYLES, ids=str)
def test_models_of_many_styles_are_planned(function, shape, own_loss):
    model = made(function, shape, f"{PROGRAMS}/styles.py")
    assert model.returns_loss == own_loss
    for find in (own.replicated, own.sharded):
        found = find(request(model))
        assert found.memory > model.weights / 2 and found.seconds > 0 and (found.most() or 9) > 8


@pytest.mark.parametrize(
    ("function", "shape", "find", "words"),
    [
        ("contrast", None, own.sharded, "fully_shard doesn't support scalar parameters"),
        ("Queries", "3,64,64", own.split_layers, "nn.MultiheadAttention has query, key and value in one parameter"),
        ("Gpt", "16t", own.split_layers, "fails on tensors without numbers"),
        ("Unet", "3,32,32", own.split_layers, "named like q_proj, o_proj, up_proj and down_proj"),
        ("Unet", "3,32,32", own.pipeline, "no list of more than five equal blocks"),
        ("Recurrent", "6t", lambda asked: own.replicated(asked, rank=16), "no Linears beside which an adapter"),
    ],
)
def test_what_is_not_planned_has_its_reason_in_words(function, shape, find, words):
    model = made(function, shape, f"{PROGRAMS}/styles.py")
    with pytest.raises(NotPlanned, match=words):
        find(request(model))


def test_layers_that_do_not_divide_are_not_split():
    llama = made("tied_20m", "64t", f"{PROGRAMS}/llama.py")
    with pytest.raises(NotPlanned, match="num_kv_heads = 2 does not divide by 3"):
        own.split_layers(request(llama, devices=3))
    with pytest.raises(NotPlanned, match="between the nodes"):
        own.split_layers(request(llama, devices=2, nodes=2))
    split = own.split_layers(request(llama, batch=8))
    assert split.sent == 8 * 2 * 2 * (8 * 64 * 384 * 4)  # blocks, layers, directions, bytes: (2 - 1) / 2 twice


def test_shards_within_a_node_send_little_between_nodes():
    llama = made("tied_20m", "64t", f"{PROGRAMS}/llama.py")
    asked = request(llama, batch=16, devices=16, nodes=2, gpu="h100")
    across, hsdp = own.sharded(asked), own.sharded(asked, hsdp=True)
    assert hsdp.sending < across.sending and hsdp.memory > across.memory
    both = own.sharded_and_split(asked)
    assert both.settings == {"processes": 16} and both.memory > 0


def test_parts_of_a_batch_have_a_row_where_shards_fit_in_no_other_way(monkeypatch):
    rules = own.rules_of
    monkeypatch.setattr(own, "rules_of", lambda asked: [rule for rule in rules(asked) if rule.answer.startswith(both)])
    both, llama = f"fsdp{BOTH}", made("tied_20m", "64t", f"{PROGRAMS}/llama.py")
    whole = own.sharded(request(llama, batch=64), bf16=True, checkpointing=True).memory
    larger, smaller = (request(llama, batch=64, memory=whole + RESERVE + more) for more in (1, -1))
    assert [row.answer for row in compare(larger)] == [both]
    in_parts, at_once = compare(smaller)
    assert (in_parts.answer, at_once.answer) == (f"fsdp{ALL}", both)
    assert in_parts.fits and in_parts.predicted.settings == {"microbatches": 2, "processes": 2}


def test_a_pipeline_spreads_the_blocks_and_its_bubble_takes_time():
    llama = made("tied_20m", "64t", f"{PROGRAMS}/llama.py")
    whole = own.replicated(request(llama, batch=16, devices=1))
    found = own.pipeline(request(llama, batch=16))
    assert found.settings == {"microbatches": 8, "processes": 2} and found.memory < whole.memory
    assert 0.5 * whole.seconds < found.seconds


def test_adapters_are_all_that_is_trained():
    llama = made("tied_20m", "64t", f"{PROGRAMS}/llama.py")
    adapted, plain = step(llama, rank=16), step(llama)
    # Of each block: query and out, key and value, three of the MLP; rank x (inputs + outputs), in float32.
    per_block = 2 * (384 + 384) + 2 * (384 + 128) + 3 * (384 + 1024)
    assert adapted.trained == 8 * 16 * per_block * 4
    assert adapted.weights == plain.weights / 2 + adapted.trained
    assert not made("Adapters", "32", f"{PROGRAMS}/styles.py").all_trained  # then there is no such row


def test_a_model_that_checkpoints_its_layers_needs_less():
    kept, twice = made("kept", "3,64,64"), made("checkpointed", "3,64,64")
    assert step(twice).peak < 0.6 * step(kept).peak and step(kept, checkpointing=True).peak < 0.6 * step(kept).peak


def test_a_scripted_module_is_refused_in_one_line():
    with pytest.raises(UserError, match="scripted module, whose code cannot be followed") as refusal:
        made("scripted", "3,64,64")
    assert "\n" not in str(refusal.value)


def test_a_file_that_prints_reads_arguments_and_ends_itself_is_planned(tmp_path, capfd):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments, path = list(sys.argv), list(sys.path)
    assert OwnModel(f"{tmp_path}/script.py:net", (8,)).layers == ["0", "1"]
    assert capfd.readouterr() == ("", "") and sys.argv == arguments and sys.path == path


def test_a_strategy_in_which_a_model_fails_is_not_planned_and_a_note_says_why():
    model = made("GrowingList", "8")
    rows = {row.answer: row.predicted for row in compare(request(model))}
    assert rows["ddp, activation checkpointing"] is None and rows["ddp"] is not None
    ((reason, strategies),) = [item for item in model.not_planned.items() if "running_mean" in item[0]]
    assert reason.startswith("a step like that fails on tensors without numbers (") and "ddp" not in strategies
    assert "not planned" in table(request(model), compare(request(model)))


def test_a_model_that_is_larger_than_this_machine_takes_no_memory():
    assert step(made("huge", str(2**16))).weights > 64 * 2**30


def test_a_model_that_cannot_be_planned_is_refused_in_one_line(capfd):
    for function, shape, words in (
        ("branch", "8", "asks for values"),
        ("masked", "8", "asks for values"),
        ("needs_one", "8", "allowed: a function without arguments"),
        ("empty", "8", "no parameters to train"),
        ("number", "8", "returns int; allowed: a torch.nn.Module"),
        ("checkpointed", "4,8,8", "a step of --model"),
        ("nothing", "8", "cannot be imported"),
    ):
        with pytest.raises(UserError) as refusal:
            made(function, shape)
        assert words in str(refusal.value) and "\n" not in str(refusal.value), refusal.value
    for function, shape, words in (
        ("MixtureAsInPublicCode", "6,16", "asks for values"),
        ("Nested", "6,8", "does not run without numbers"),
        ("read_large", "32768", "asks for numbers while it is built, and is larger than 1 GiB"),
    ):
        with pytest.raises(UserError) as refusal:
            made(function, shape, f"{PROGRAMS}/styles.py")
        assert words in str(refusal.value) and "\n" not in str(refusal.value), refusal.value
    assert capfd.readouterr() == ("", "")


def test_the_command_line_plans_an_own_model(capfd):
    limits = ["--devices", "2", "--batch", "16", "--gpu", "l40s", "--gpu-memory", "769MiB"]
    assert main(["plan", "--model", f"{FILE}:words", "--input", "6", "--tokens", "--optimizer", "adamw", *limits]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("ddp: Each of 2 devices holds the whole model") and "train_ddp.py" in out
    assert err == ""  # no line of progress but on a terminal, and nothing of fake tensors
    for words in (
        "batch of 16 samples is that of all devices together; optimizer adamw; samples of 6; parameters in float32",
        "l40s (https://www.nvidia.com/en-us/data-center/l40s/)",
        "the largest batch that fits with ddp: ",
        "gradient_as_bucket_view=True",
        "not planned: pipeline; pipeline, bf16, activation checkpointing: it has no list",
    ):
        assert words in out
    rows = {line.removeprefix("->").split()[0].rstrip(",") for line in out.splitlines() if " yes " in line}
    assert rows == {"ddp", "fsdp"}
    for wrong, words in (
        (["--model", f"{FILE}:words", *limits], "needs --input"),
        (["--input", "6", *limits], "is for a model of your own"),
        (["--model", "resnet10", *limits], "did you mean 'resnet101'?"),
        (["--model", f"{FILE}:words", "--input", "3,x", *limits], "allowed: whole numbers above 0"),
        (["--model", f"{FILE}:words", "--input", "6", "--gpu", "h100"], "--devices is missing"),
    ):
        assert main(["plan", *wrong]) == 2
        out, err = capfd.readouterr()
        assert words in err and err.count("\n") == 1, err


def test_the_memory_of_a_gpu_is_that_of_its_data_sheet():
    options = PlanOptions(model=f"{FILE}:words", input="6", tokens=True, devices=1, gpu="h200", batch=4)
    told = []
    text, rows = answer(options, told.append)
    assert f"a device has {143_771:,} MiB" in text and rows[0]["memory_mib"] < 1 and rows[0]["fits"]
    assert told[0].startswith("planning: building ") and "planning: single, bf16" in told  # what a terminal shows
    assert not re.search("ddp|fsdp", "".join(row["strategy"] for row in rows))


def test_buffers_of_equal_blocks_are_planned_and_the_rows_are_json(tmp_path, capsys):
    """Such as the tables of a rotary embedding."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Block(nn.Linear):\n    def __init__(self):\n"
        "        super().__init__(64, 64)\n        self.register_buffer('table', torch.zeros(64, 64))\n\n\n"
        "def made():\n    return nn.Sequential(*[Block() for _ in range(6)])\n"
    )
    words = ["--input", "64", "--devices", "2", "--gpu", "h100", "--json", f"{tmp_path}/rows.json"]
    assert main(["plan", "--model", f"{tmp_path}/model.py:made", *words]) == 0
    assert capsys.readouterr().out.startswith("ddp: ")
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["fits"] is True

"""Models of readers, built as people build them: what is counted of each, into how many blocks, and what is said."""

import json
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from project import root

from mpdemo.__main__ import main
from mpdemo.errors import UserError
from mpdemo.tools.plan import own, own_scaling, strategies
from mpdemo.tools.plan.command import PlanOptions, answer
from mpdemo.tools.plan.efficiency import AT_BEST
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.own_prediction import OVERLAP, Ring, waiting
from mpdemo.tools.plan.request import NotPlanned, PlanRequest
from mpdemo.tools.plan.strategies import as_rows, compare, table

# function, shape of a sample (t: of tokens), parameters that train
CASES = [
    ("Tied", "64t", 153_216),
    ("with_tables", "64", 24_960),
    ("orthogonal", "64", 4_810),
    ("frozen_backbone", "3,64,64", 5_130),
    ("checkpointed", "3,16,16", 37_738),
    ("lazy", "3,32,32", 144_458),
    ("in_place_first", "3,32,32", 72_234),
    ("on_meta", "3,16,16", 12_218),
    ("dict_chain", "3,16,16", 12_218),
    ("compiled", "3,16,16", 12_218),
    ("bf16", "3,16,16", 12_218),
    ("double", "512", 525_312),
    ("Detector", "3,64,64", 1_656),
    ("unet", "4,8,8,8", 85_920),
    ("Experts", "6,16", 2_116),
    ("Moco", "3,4,4", 784),
    ("recommender", None, 8_583),
    ("Rivals", "3,4,4", 481),
    ("Recurrent", "6t", 5_090),
    ("gpt_with_targets", None, 71_616),
    ("triplet", None, 784),
    ("Fourier", "3,16,16", 960),
    ("Density", "8", 72),
    ("Adapters", "32", 2_048),
    ("OnAGpu", "64", 4_160),
    ("read_small", "64", 4_160),
]
NOTES = {
    "Tied": "embed.weight and head.weight are one parameter",
    "unet": "no gradient reaches end.1.weight, end.1.bias",
    "recommender": "--batch does not scale ",
    "Recurrent": "cuDNN may keep more",
}
OWN_LOSS = {"Rivals", "gpt_with_targets", "triplet"}
SIZES = {"bf16": 2, "double": 8, "Fourier": 8}  # bytes of a parameter that are not 4
FILE = f"{root()}/tests/programs/own_models.py"
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


def made(function, shape=None):
    tokens = bool(shape and shape.endswith("t"))
    return OwnModel(f"{FILE}:{function}", shape and tuple(map(int, shape.rstrip("t").split(","))), tokens)


@pytest.fixture(scope="module")
def llama():
    """One model for all tests, since its steps are remembered with it."""
    return OwnModel(f"{root()}/tests/programs/llama.py:tied_20m", (64,), tokens=True)


def request(model, batch=8, devices=2, **more):
    return PlanRequest(model, batch, devices, optimizer="sgd", **more)


def step(model, **way):
    return own.steps_of(request(model), 4, **way).at(4)


@pytest.mark.parametrize(("function", "shape", "parameters"), CASES, ids=str)
def test_any_module_is_planned_and_counted_as_pytorch_counts_it(function, shape, parameters):
    model, note = made(function, shape), NOTES.get(function, "")
    one, ddp, fsdp = step(model), own.replicated(request(model)), own.sharded(request(model), parts=(1,))
    assert model.trained == one.trained == parameters * SIZES.get(function, 4)
    assert model.returns_loss == (function in OWN_LOSS)
    assert len(model.notes) == bool(note) and note in "".join(model.notes), model.notes
    assert ddp.sent == pytest.approx(one.trained + one.buffers / 2)
    assert ddp.memory - one.peak == model.trained  # DDP's buckets
    assert fsdp.memory > model.weights / 2
    for found in (ddp, fsdp):
        assert found.seconds > 0 and (found.most() or 9) > 8


def test_inputs_that_belong_to_no_sample_are_the_same_in_any_batch_and_are_named():
    model = made("recommender")
    sizes = {name: len(tensor) for name, tensor in model.inputs(64).items()}
    assert sizes == {"dense": 64, "sparse": 3, "pairs": 2}
    assert "pairs" in "".join(model.notes)


@pytest.mark.parametrize(
    ("function", "shape", "find", "words"),
    [
        ("contrast", None, own.sharded, "fully_shard doesn't support scalar parameters"),
        (
            "Tied",
            "64t",
            own.split_layers,
            "nn.MultiheadAttention has query, key and value in one parameter",
        ),
        ("Gpt", "16t", own.split_layers, "a block does not run with its Linears split by their names"),
        ("unet", "4,8,8,8", own.split_layers, "named like q_proj, o_proj, up_proj and down_proj"),
        ("unet", "4,8,8,8", own.pipeline, "no list of more than five equal blocks"),
        (
            "Recurrent",
            "6t",
            lambda asked: own.replicated(asked, rank=16),
            "no Linears beside which an adapter",
        ),
    ],
)
def test_what_is_not_planned_has_its_reason_in_words(function, shape, find, words):
    with pytest.raises(NotPlanned, match=words):
        find(request(made(function, shape)))


def test_layers_that_do_not_divide_are_not_split(llama):
    with pytest.raises(NotPlanned, match="num_kv_heads = 2 does not divide by 3"):
        own.split_layers(request(llama, devices=3))
    with pytest.raises(NotPlanned, match="between the nodes"):
        own.split_layers(request(llama, devices=2, nodes=2))
    split = own.split_layers(request(llama, batch=8))
    # blocks, layers, directions, bytes: (2 - 1) / 2 twice
    assert split.sent == 8 * 2 * 2 * (8 * 64 * 384 * 4)


def test_messages_hide_behind_the_computation_which_they_slow_down(llama):
    """But for one layer's and those inside blocks; and a step ends when the slowest of all devices has computed."""
    asked = partial(request, llama, gpu="h100", efficiency=AT_BEST)
    alone = own.replicated(asked(batch=8, devices=1), parts=(1,)).seconds
    ddp = own.replicated(asked(batch=64, devices=8), parts=(1,))
    expected = (alone + OVERLAP * ddp.sending) * waiting(8) + ddp.sending / llama.count
    assert ddp.sending < alone and ddp.seconds == pytest.approx(expected, rel=0.02)
    split = own.split_layers(asked(batch=8))
    assert split.seconds > 0.5 * alone + split.sending
    assert waiting(1) == 1 < waiting(2) < waiting(64) < 1.07


def test_a_ring_has_latency_and_enters_a_node_through_the_ports_of_all_its_devices():
    within, across = Ring(8, 1, 450e9), Ring(64, 8, 400e9)
    assert within.seconds(360e9, 0, 0.8) == 1 and Ring(1, 1, 1.0).seconds(1, 1, 0.8) == 0
    assert within.seconds(0, 1, 0.8) == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    assert across.seconds(0, 2, 0.8) == pytest.approx(2 * (8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6))


def test_a_host_holds_and_updates_what_is_offloaded(llama):
    asked = request(llama, batch=64)
    plain, some, again = (
        own.sharded(asked, "bf16", (1,), **own.AGAIN[way]).memory
        for way in ("", own.PARTLY, own.RECOMPUTED)
    )
    host = own.sharded(asked, "bf16", offload=True, checkpointing=True)
    assert again < 0.8 * some < 0.7 * plain and host.memory < again
    # A layer's parameters come twice, what is the module's own once, and each gradient goes: of half the model.
    own_ones = llama.weights - sum(
        p.nbytes for layer in llama.layers_of(llama.template) for p in layer.parameters()
    )
    assert host.moved == pytest.approx((3 * llama.weights - own_ones) / 2, rel=0.001)
    assert host.least == pytest.approx((2 * llama.weights - own_ones) / 2 / 32e9, rel=0.001)
    # Two ranks share a host's cores, so that it updates the whole model: an SGD moves 3 values, an AdamW 7.
    assert host.updating == pytest.approx(3.2e-9 / 32 * 3 / 7 * llama.trained / 4)
    assert host.on_host == pytest.approx(llama.weights + llama.trained)
    assert host.seconds >= host.least + host.updating


def test_a_stage_in_bf16_casts_its_weights_once_in_a_step(llama):
    asked = request(llama, batch=16)
    limits = asked.roof("bf16")
    stage, alone = (own.steps_of(asked, 2, half="bf16", held=True, stage=stage) for stage in (True, False))
    for part, lone in zip(*(own_scaling.chain(steps, 2, limits) for steps in (stage, alone)), strict=True):
        assert (
            lone.seconds - part.seconds > 1.5 * part.weights / limits.moved
        )  # reads weights, writes copies
        assert lone.weights == part.weights and lone.trained == part.trained
    assert own.pipeline(asked, "bf16").seconds < own._stages(asked, "bf16", alone.way._asdict(), 8).seconds


def test_a_pipeline_spreads_the_blocks_and_its_bubble_takes_time(llama):
    whole = own.replicated(request(llama, batch=16, devices=1))
    found = own.pipeline(request(llama, batch=16))
    assert found.parts == 8 and found.memory < whole.memory
    assert 0.5 * whole.seconds < found.seconds
    assert made("with_tables", "64").around() == [[0, 0], [0, 0]]  # the model itself is the list


def test_adapters_are_all_that_is_trained(llama):
    adapted, plain = step(llama, rank=16), step(llama)
    assert (
        step(llama, rank=16, half="bf16").trained == adapted.trained / 2
    )  # without autocast, all in 16 bits
    # Of each block: query and out, key and value, three of the MLP; rank x (inputs + outputs), in float32.
    per_block = 2 * (384 + 384) + 2 * (384 + 128) + 3 * (384 + 1024)
    assert adapted.trained == 8 * 16 * per_block * 4
    assert adapted.weights == plain.weights / 2 + adapted.trained
    assert not made("Adapters", "32").all_trained  # then there is no such row


def test_a_model_that_checkpoints_its_layers_needs_less():
    kept, twice = made("kept", "3,64,64"), made("checkpointed", "3,64,64")
    assert (
        step(twice).peak < 0.6 * step(kept).peak
        and step(kept, checkpointing=True).peak < 0.6 * step(kept).peak
    )


def test_a_file_that_prints_reads_arguments_and_ends_itself_is_planned(tmp_path, capfd):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments, path = list(sys.argv), list(sys.path)
    assert OwnModel(f"{tmp_path}/script.py:net", (8,)).layers == ["0", "1"]
    assert capfd.readouterr() == ("", "") and sys.argv == arguments and sys.path == path


def test_a_strategy_in_which_a_model_fails_is_not_planned_and_a_note_says_why():
    model = made("GrowingList", "8")
    asked = request(model, precision="fp32")
    rows = compare(asked)
    reasons = {row.answer: row.reason for row in rows}
    assert "ddp" in reasons and "running_mean" in reasons["ddp, recomputed"]
    assert reasons["ddp, recomputed"].startswith("a step like that fails on tensors without numbers (")
    assert "ddp, recomputed" not in table(asked, rows)  # a note has it


BLOCKS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, number, every):
        super().__init__()
        self.up_proj, self.down_proj, self.again = nn.Linear(64, 256), nn.Linear(256, 64), number % every == every - 1

    def inner(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(x)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

class Net(nn.Module):
    def __init__(self, every, kind=list, outside=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), None if outside else nn.Linear(64, 512, bias=False)
        blocks = [Block(number, every) for number in range(12)]
        self.blocks = nn.ModuleList(blocks) if kind is list else nn.ModuleDict(zip(map(str, range(12)), blocks))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embed.weight) if self.head is None else self.head(x)

def alike(): return Net(99)
def every_second(): return Net(2)
def every_fourth(): return Net(4)
def outside(): return Net(99, outside=True)
"""


@pytest.fixture
def blocks(tmp_path):
    """A function that makes one of the models above."""
    (tmp_path / "blocks.py").write_text(BLOCKS)
    return lambda name: OwnModel(f"{tmp_path}/blocks.py:{name}", (32,), tokens=True)


@pytest.mark.parametrize("name", ["every_second", "every_fourth"])
def test_blocks_that_differ_by_a_flag_are_all_computed(blocks, name):
    """The first four and five of them look alike, or don't run alike."""
    model, alike = blocks(name), blocks("alike")
    assert alike.few and not model.few
    assert step(model).peak < 0.97 * step(alike).peak
    with pytest.raises(NotPlanned, match="no list of more than five equal blocks"):
        own.pipeline(request(model))


def test_a_weight_that_is_used_outside_its_layer_is_left_to_the_whole_module(blocks):
    model = blocks("outside")
    assert "embed" not in model.layers and "embed" in blocks("alike").layers
    assert own.sharded(request(model), parts=(1,)).memory > 0


def test_the_flags_of_a_row_are_those_of_the_script(blocks, monkeypatch):
    monkeypatch.syspath_prepend(f"{root()}/notebooks/scripts")
    from train_gpt import read_flags

    asked = request(blocks("alike"), batch=64, devices=8, nodes=2, gpu="h100")
    again = {"checkpointing": True}
    flags = [
        (own.sharded(asked, hsdp=True), "--replicate 2 --shard 4 --no-bf16 --no-recompute"),
        (own.sharded_and_split(asked, precision="bf16", **again), "--shard 4 --tp 2 --bf16 --recompute"),
        (own.replicated(asked, "bf16"), "--replicate 8 --bf16 --no-recompute"),
        (own.replicated(asked, "bf16", rank=16), ""),
        (own.replicated(asked, "autocast"), ""),
    ]
    size = ["--batch", "64", "--blocks", "12", "--heads", "8", "--width", "64", "--no-compile"]
    for found, text in flags:
        assert found.flags == text
        if text:
            read = read_flags([*text.split(), *size])  # it refuses what does not go together
            assert read.pp * read.replicate * read.shard * read.tp == 8, text


def test_a_row_says_what_its_step_time_means_for_a_whole_run(llama):
    """Products of a Llama: 6 operations per token for each weight but the embedding's, and those of attention."""
    asked = request(llama, batch=64, devices=8, gpu="h100", total=3e9, price=2.5)
    rules = [
        rule for rule in own.rules_of(asked) if rule.mesh in ("ddp", "fsdp") and rule.again != own.PARTLY
    ]
    rows = [strategies._planned(asked, rule) for rule in rules]
    for row in as_rows(asked, rows):
        if row["seconds"] and row["fits"] != "no" and "LoRA" not in row["strategy"]:
            assert row["per_second"] == 64 * 64 / row["seconds"]
            assert row["gpu_hours"] == pytest.approx(8 * 3e9 / row["per_second"] / 3600)
            assert row["price"] == 2.5 * row["gpu_hours"]
            peak = 989e12 if "bf16" in row["strategy"] else 67e12
            attention = 8 * 12 * 64 * 384  # blocks; two products, forward and backward, of all scores
            products = 6 * llama.weights / 4 + attention
            assert row["mfu"] == pytest.approx(products * row["per_second"] / (8 * peak), rel=0.02), row
    shown = table(asked, rows)
    assert all(word in shown for word in ("tokens", "MFU", "GPU hours", "(EUR)"))
    assert "GPU hours" not in table(replace(asked, total=None, price=None), rows)
    assert made("in_place_first", "3,32,32").unit == ("images", 1) and made("Density", "8").unit == (
        "samples",
        1,
    )


def test_a_model_that_is_larger_than_this_machine_takes_no_memory():
    assert step(made("huge", str(2**16))).weights > 64 * 2**30


@pytest.mark.parametrize(
    ("function", "shape", "words"),
    [
        ("branch", "8", "asks for values"),
        pytest.param(
            *("Gpt", "16", "are samples tokens? Then add --tokens"),
            marks=pytest.mark.xfail(torch.__version__ < "2.12", reason="PyTorch 2.11 embeds floats here"),
        ),
        ("needs_one", "8", "allowed: a function without arguments"),
        ("empty", "8", "no parameters to train"),
        ("number", "8", "returns int; allowed: a torch.nn.Module"),
        ("scripted", "8", "scripted module, whose code cannot be followed"),
        ("checkpointed", "4,8,8", "a step of --model"),
        ("nothing", "8", "cannot be imported"),
        ("MixtureAsInPublicCode", "6,16", "asks for values"),
        ("Speech", "6,8", "asks for values"),
        ("Nested", "6,8", "does not run without numbers"),
        ("read_large", "32768", "asks for numbers while it is built, and is larger than 1 GiB"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_in_one_line(capfd, function, shape, words):
    with pytest.raises(UserError) as refusal:
        made(function, shape)
    assert words in str(refusal.value) and "\n" not in str(refusal.value), refusal.value
    assert capfd.readouterr() == ("", "")


def test_the_command_line_plans_an_own_model(capfd, tmp_path):
    limits = ["--devices", "2", "--batch", "16", "--gpu", "l40s", "--gpu-memory", "769MiB"]
    words = ["--model", f"{FILE}:words", "--input", "6", "--tokens", "--optimizer", "adamw", *limits]
    assert main(["plan", *words, "--json", f"{tmp_path}/rows.json"]) == 0
    out, err = capfd.readouterr()
    assert (
        out.startswith("fsdp, bf16: Weights, gradients and states are sharded over 2 devices")
        and "train_ddp.py" in out
    )
    assert err == ""  # no line of progress but on a terminal, and nothing of fake tensors
    for words in (
        "batch of 16 samples is that of all devices together; optimizer adamw; samples of 6; parameters in float32",
        "l40s (https://www.nvidia.com/en-us/data-center/l40s/)",
        "of this GPU no kernel was measured",
        "the largest batch that fits with fsdp, bf16: ",
        "not planned: tensor: its blocks have no Linears",
    ):
        assert words in out
    assert " to " not in "".join(line for line in out.splitlines() if " yes " in line)  # no interval
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["fits"] == "yes"
    for wrong, words in (
        (["--model", f"{FILE}:words", *limits], "needs --input"),
        (["--input", "6", *limits], "is for a model of your own"),
        (["--model", "resnet10", *limits], "did you mean 'resnet101'?"),
        (["--model", f"{FILE}:words", "--input", "3,x", *limits], "allowed: whole numbers above 0"),
        (["--model", f"{FILE}:words", "--input", "6", "--gpu", "h100"], "--devices is missing"),
        (
            ["--model", f"{FILE}:words", "--input", "6", *limits, "--record", "none.json"],
            "none.json cannot be read",
        ),
    ):
        assert main(["plan", *wrong]) == 2
        out, err = capfd.readouterr()
        assert words in err and err.count("\n") == 1, err


def test_a_name_of_a_model_writes_no_colours_on_a_terminal(tmp_path):
    (tmp_path / "red.py").write_text("""
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.add_module("\x1b[31mred\u202e\x07", nn.Linear(8, 8))
""")
    options = PlanOptions(model=f"{tmp_path}/red.py:Net", input="8", devices=1, gpu="h100", batch=4)
    assert "no gradient reaches red.weight, red.bias" in answer(options, print)[0]


LEAVES = """
import os
from torch import nn

def leave(where):
    if where == "{where}":
        os._exit(0)

class Net(nn.Linear):
    def forward(self, x):
        leave("forward")
        return super().forward(x)

leave("file")

def net():
    leave("function")
    return Net(8, 8)
"""


@pytest.mark.parametrize(("where", "words"), [
    ("file", "cannot be imported: AttributeError"),
    ("function", "ends with SystemExit: 0; allowed: a function without arguments"),
    ("forward", "ends the process (SystemExit: 0); allowed: one that returns"),
])  # fmt: skip
def test_a_model_that_ends_the_process_is_one_line_and_no_success(where, words, tmp_path, capfd):
    (tmp_path / "leaves.py").write_text(LEAVES.replace("{where}", where))
    asked = ["--model", f"{tmp_path}/leaves.py:net", "--input", "8", "--devices", "1", "--gpu", "h100"]
    assert main(["plan", *asked]) == 2
    out, err = capfd.readouterr()
    assert out == "" and words in err and err.count("\n") == 1, err


def test_the_memory_of_a_gpu_is_that_of_its_data_sheet():
    options = PlanOptions(model=f"{FILE}:words", input="6", tokens=True, devices=1, gpu="h200", batch=4)
    told = []
    text, rows = answer(options, told.append)
    assert (
        f"a device has {143_771:,} MiB" in text and rows[0]["memory_mib"] < 1 and rows[0]["fits"] == "yes"
    )
    # what a terminal shows
    assert told[0].startswith("planning: building ") and "planning: single, autocast" in told
    assert not re.search("ddp|fsdp", "".join(row["strategy"] for row in rows))

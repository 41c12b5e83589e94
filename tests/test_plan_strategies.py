"""The table of all strategies, for a model of the course and for a reader's own."""

from dataclasses import replace

import pytest

from mpdemo.errors import UserError
from mpdemo.models.own import OwnModel
from mpdemo.plan import meter, strategies
from mpdemo.plan.case import Case
from mpdemo.plan.choose import choose
from mpdemo.plan.footprint import footprints
from mpdemo.plan.memory import MIB, RESERVE

CASE = Case("convnet", batch=8, devices=2, image_size=56, classes=10)  # 1 MiB of weights and states
OWN = '''
import torch
from torch import nn


class Skip(nn.Module):
    """Two layers between which two tensors go: no boundary of stages can lie there."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        x = self.third(self.second(x) + 1) + x
        for layer in self.layers:
            x = layer(x)
        return x.view(len(x), 4 * 64)


class Residual(nn.Module):
    def __init__(self, act, slope):
        super().__init__()
        self.layer, self.act, self.slope = nn.Linear(8, 8), act, slope

    def forward(self, x):
        return x + self.slope * self.act(self.layer(x))


class Alike(nn.Module):
    """Layers of equal size, some of which do the same."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        kinds = (nn.ReLU(), 1), (nn.ReLU(), 1), (nn.GELU(), 1), (nn.ReLU(), 2), (nn.ReLU(), 1)
        self.layers = nn.ModuleList(Residual(*kind) for kind in kinds)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


class Starts(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return super().forward(x.relu_())


class Masked(nn.Linear):
    def forward(self, x):
        return super().forward(x[x[:, 0] > 0])


def skip(): return Skip()
def alike(): return Alike()
def words(): return nn.Sequential(nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 50))
def huge(): return nn.Sequential(nn.Flatten(), *(nn.Linear(2**16, 2**16) for _ in range(4)))
def branch(): return Branch()
def masked(): return Masked(8, 8)
def in_place(): return nn.Sequential(nn.Linear(8, 8), Residual(nn.ReLU(inplace=True), 1), Starts())
def needs_one(width): return nn.Linear(width, 8)
def empty(): return nn.Sequential(nn.Flatten())
def number(): return 7
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a module of models, which is the current one."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


def test_what_fits_comes_first_and_the_first_is_the_answer():
    tight = replace(CASE, memory=RESERVE + 4 * MIB)
    rows = strategies.compare(tight)
    assert rows[0].answer == choose(tight).answer
    fits = [row.fits for row in rows]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    for row in rows:
        assert row.predicted is None or (row.predicted.memory <= tight.limit) == row.fits


def test_the_table_marks_the_answer_and_says_by_how_much_the_others_are_too_large():
    tight = replace(CASE, memory=RESERVE + 4 * MIB)
    text = strategies.table(tight, strategies.compare(tight)).splitlines()
    assert text[3].startswith("->") and " yes " in text[3]  # below the headers of two lines
    assert any("MiB over" in line for line in text)
    assert ["tensor", "cannot"] in [line.split() for line in text]  # no layer of a convolutional net is split


def test_an_own_model_is_cut_where_one_tensor_goes_from_layer_to_layer(own):
    model = OwnModel(f"{own}:skip", (3, 8, 8))
    blocks = footprints(model, 8)
    assert [block.name for block in blocks] == ["first", "second", "layers.0.0", "layers.1.0", "layers.2.0"]
    assert sum(block.parameters for block in blocks) == 16 + 5 * 20
    assert blocks[-1].output == 4 * 64 * 4 and not model.uncut


def test_layers_of_a_traced_model_that_do_the_same_are_measured_once(own, monkeypatch):
    model = OwnModel(f"{own}:alike", (8,))
    blocks = model.at(2)
    signatures = [meter.signature(blocks.stage(number, number + 1)) for number in range(len(blocks))]
    assert [signatures.index(signature) for signature in signatures] == [0, 1, 1, 3, 4, 1]
    once = footprints(model, 8)
    monkeypatch.setattr(meter, "signature", id)
    one_by_one = footprints(OwnModel(f"{own}:alike", (8,)), 8)
    for block, other in zip(once, one_by_one, strict=True):
        assert block.bytes("saved", 4) == other.bytes("saved", 4) and block.parameters == other.parameters


def test_an_own_list_of_layers_is_counted_and_takes_no_memory(own):
    words = footprints(OwnModel(f"{own}:words", (6,), tokens=True), 0)
    assert [block.name for block in words] == ["0", "1.0", "2"]
    huge = footprints(OwnModel(f"{own}:huge", (2**16,)), 0)
    assert sum(block.weights for block in huge) > 64 * 2**30


def test_a_model_that_cannot_be_traced_stays_whole_or_is_refused_in_one_line(own, capfd):
    for function, shape, words in (
        ("branch", (8,), "asks for values"),
        ("masked", (8,), "asks for values"),
        ("needs_one", (8,), "allowed: a function without arguments"),
        ("empty", (8,), "no parameters to train"),
        ("number", (8,), "returns int; allowed: a torch.nn.Module"),
        ("skip", (4, 8, 8), "does not compute samples of shape (4, 8, 8)"),
        ("nothing", (8,), "cannot be imported"),
    ):
        with pytest.raises(UserError) as refusal:
            OwnModel(f"{own}:{function}", shape)
        assert words in str(refusal.value) and "\n" not in str(refusal.value), refusal.value
    assert OwnModel(f"{own}:in_place", (8,)).at(2).names == ["model"]  # a stage cannot begin in place
    assert capfd.readouterr() == ("", "")  # torch.export prints a graph where it finds no way on


def test_the_command_line_plans_an_own_model(own, run_mpdemo):
    limits = ("--devices", "2", "--batch", "16", "--gpu-memory", "769MiB")
    done = run_mpdemo("plan", "--model", f"{own}:words", "--input", "6", "--tokens", *limits)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ddp: Each of 2 devices") and "scripts/train_ddp.py" in done.stdout
    for wrong, words in (
        (("--model", f"{own}:words"), "needs --input"),
        (("--input", "6"), "belong to a model of your own"),
        (("--model", "resnet10"), "did you mean 'resnet101'?"),
        (("--model", f"{own}:words", "--input", "3,x"), "allowed: whole numbers above 0"),
    ):
        done = run_mpdemo("plan", *wrong, *limits)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr

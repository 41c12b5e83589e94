"""What a GPU's kernels reach: read from our records and from traces of torch.profiler, and used in a plan's times."""

import gzip
import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu import page
from programs.llama import Llama
from torch.profiler import profile
from torchvision.models.resnet import BasicBlock, ResNet

from mpdemo.errors import UserError
from mpdemo.models.private_torch import FakeTensors
from mpdemo.paths import root
from mpdemo.tools.plan import own
from mpdemo.tools.plan.command import PlanOptions, answer
from mpdemo.tools.plan.efficiency import (
    AT_BEST,
    ATTENTION,
    COMPILED,
    CONVOLUTION,
    KINDS,
    MEASURED,
    MEMORY,
    OPTIMIZER,
    PRODUCT,
    Efficiency,
)
from mpdemo.tools.plan.kernels import Kernels
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.records import efficiency_of
from mpdemo.tools.plan.request import PlanRequest
from mpdemo.tools.plan.roof import kernel_seconds, roof

RECORD = root() / "notebooks/gpu/2026-11-27-4-h100-efficiency-of-its-trace.json"
DEVICE = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}
NAMES = {  # operators of any CPU whose kernels a GPU would have -> their names there, and classes
    # which calls what the CPU's instructions allow
    "aten::convolution": ("aten::cudnn_convolution", CONVOLUTION),
    "aten::convolution_backward": ("aten::convolution_backward", CONVOLUTION),
    "aten::addmm": ("aten::addmm", PRODUCT),
    "aten::mm": ("aten::mm", PRODUCT),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("aten::_cudnn_attention_forward", ATTENTION),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        "aten::_cudnn_attention_backward",
        ATTENTION,
    ),
    "aten::threshold_backward": ("aten::threshold_backward", MEMORY),
    "aten::silu": ("aten::silu", MEMORY),
}


def step(model, x, half):
    """A training step as anybody writes it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(x).float().square().mean()
    loss.backward()


def counted(make, x, half) -> dict:
    """What the operations of a step take at best, by class, as the plan counts them; and how many there are."""
    with FakeTensors(allow_non_fake_inputs=True), Kernels() as kernels:
        step(make(), torch.empty_like(x), half)
    limits, rows = roof("h100", AT_BEST)._replace(launch=0.0), np.array(kernels.work, dtype=float)
    return {kind: kernel_seconds(rows[rows[:, 4] == kind], limits) for kind in set(rows[:, 4].astype(int))}


def trace_of(make, x, half, file, seconds, **options):
    """Write the trace of a step on this CPU as a GPU's, whose kernels of a class take so many seconds together."""
    model = make()
    with profile(**{"record_shapes": True} | options) as profiler:
        step(model, x, half)
    profiler.export_chrome_trace(plain := str(file).removesuffix(".gz"))
    trace = json.loads(Path(plain).read_text())
    found = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and e["name"] in NAMES]
    kinds = [NAMES[event["name"]][1] for event in found]
    for event, kind in zip(found, kinds, strict=True):
        if event["name"] == "aten::convolution":  # has the stride first, and cuDNN's has the padding
            given = event["args"]["Concrete Inputs"]
            given[3], given[4] = given[4], given[3]
        event["name"] = NAMES[event["name"]][0]
        took = 1e6 * seconds[kind] / kinds.count(kind)
        kernel = {"ph": "X", "cat": "kernel", "name": "sm90", "dur": took}
        trace["traceEvents"].append(kernel | {"args": {"External id": event["args"]["External id"]}})
    file.write_bytes(gzip.compress(json.dumps(trace | DEVICE).encode()))


def llama():
    """A small model with attention and SwiGLU."""
    return Llama(2, 64, 4, 4, 96, 128, False)


CASES = {
    "resnet": (
        partial(ResNet, BasicBlock, [1, 1, 1, 1]),
        torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last),
        True,
    ),
    "foreign loop": (llama, torch.zeros(1, 256, dtype=torch.long), False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trace_tells_what_each_class_reaches_as_the_plan_counts_it(case, tmp_path):
    make, x, half = CASES[case]
    least = counted(make, x, half)
    fractions = {PRODUCT: 0.5, ATTENTION: 0.4, CONVOLUTION: 0.25}
    seconds = {kind: least.get(kind, 0) / fraction for kind, fraction in fractions.items()}
    trace_of(make, x, half, file := tmp_path / "trace.json.gz", seconds | {MEMORY: 1.0})
    found = efficiency_of(file, "h100")
    for kind in {*seconds, PRODUCT} & {*least}:
        assert found.fractions[kind] == pytest.approx(fractions[kind], rel=0.02), KINDS[kind]
        assert f"{KINDS[kind]} {found.fractions[kind]:.2f}" in found.basis
    assert "trace.json.gz (NVIDIA H100 80GB HBM3, trace)" in found.basis
    assert "not in it: " in found.basis and found.basis.endswith("optimizer")


def test_our_record_of_an_h100_is_what_the_table_has():
    found, known = efficiency_of(RECORD, "h100"), MEASURED["h100"]
    for kind in (PRODUCT, ATTENTION, MEMORY, OPTIMIZER):
        assert found.fractions[kind] == pytest.approx(known.fractions[kind], abs=1e-4)
        assert f"{KINDS[kind]} {found.fractions[kind]:.2f}" in found.basis
    assert np.allclose(found.sizes, known.sizes, rtol=2e-3) and found.spreads[MEMORY] == pytest.approx(
        0.45, abs=0.01
    )
    assert "NVIDIA H100 80GB HBM3, PyTorch 2.11.0+cu130, 2026-11-27" in found.basis
    assert (
        found.fractions[CONVOLUTION] == known.fractions[CONVOLUTION]
        and "not in it: convolutions" in found.basis
    )


def of_products(*fractions) -> bytes:
    """A record of matrix products that reach such fractions."""
    row = {"class": "product", "layout": None, "precision": "bf16", "sizes": [512, 512, 512]}
    return json.dumps(
        {"parts": [{"part": "efficiency", "rows": [row | {"fraction": f} for f in fractions]}]}
    ).encode()


@pytest.mark.parametrize(("content", "line"), [
    (None, "cannot be read (No such file or directory)"),
    (b"\x1f\x8bcut", "cannot be read (EOFError"),
    (b"[]", "is neither a record nor a trace"),
    (b'{"parts": []}', "has no efficiency of any kernel"),
    (b'{"traceEvents": []}', "has no kernels of a GPU; allowed: a trace with ProfilerActivity.CUDA"),
    (json.dumps({"traceEvents": [
        {"cat": "cpu_op", "name": "aten::mm", "args": {"External id": 1}},
        {"cat": "kernel", "name": "sm90", "dur": 1.0, "args": {"External id": 1}},
    ]}).encode(), "has no shapes; allowed: a trace of torch.profiler.profile(record_shapes=True)"),
    (b'{"parts": [{"part": "efficiency", "rows": [{}]}]}', "has other things in it than it should (KeyError: 'class')"),
    (b'{"traceEvents": ["x"]}', "has other things in it than it should (AttributeError"),
    (json.dumps({"device": "NVIDIA A100-SXM4-80GB", "parts": []}).encode(), "was measured on NVIDIA A100-SXM4-80GB"),
    (of_products(-1), "matrix products reach -1 of the data sheet; allowed: above 0"),
    (of_products(0.5, 1e9), "matrix products reach 1e+09 of the data sheet; allowed: above 0, up to 2"),
    (of_products(0.5, -5), "matrix products reach -5 of the data sheet"),
    (of_products(1.5), "matrix products reach 1.5 of the data sheet; allowed: above 0, up to 1"),
    (of_products(float("nan")), "matrix products reach nan of the data sheet"),
])  # fmt: skip
def test_a_file_that_tells_nothing_is_one_line(content, line, tmp_path):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as raised:
        efficiency_of(file, "h100")
    assert line in str(raised.value) and "\n" not in str(raised.value) and str(file) in str(raised.value)


MODELS = root() / "tests/programs/own_models.py"
OF_H100 = "kernels are as slow as those of a GPT on an H100 (PyTorch 2.11, November 2026)"


@pytest.mark.parametrize(("more", "said", "interval"), [
    ({"gpu": "h100"}, OF_H100, True),
    ({"gpu": "h100", "record": str(RECORD)}, f"kernels reach of it what {RECORD.name} (NVIDIA H100", True),
    ({"gpu": "a100"}, "MosaicML and NVIDIA have published", True),
    ({"gpu": "l40s"}, "of this GPU no kernel was measured", False),
])  # fmt: skip
def test_a_plan_says_what_its_times_are_taken_from(more, said, interval):
    options = PlanOptions(model=f"{MODELS}:words", input="6", tokens=True, devices=1, batch=8, **more)
    text, rows = answer(options, lambda told: None)
    text = " ".join(text.split())
    assert (
        said in text
        and "channels" not in text
        and "fuses memory-bound kernels, which then take 57% of" in text
    )
    assert any(row["between"] for row in rows) is interval
    assert all(bool(row["between"]) is bool(row["runs_compared"]) for row in rows)


def test_channels_first_is_warned_about_where_it_costs():
    notes = {}
    for gpu in ("h100", "v100"):
        text, _ = answer(
            PlanOptions(model="convnet", image_size=32, devices=1, batch=8, gpu=gpu), lambda told: None
        )
        notes[gpu] = "Channels-first, a ResNet-50 on an H100 took 1.8 times as long" in " ".join(
            text.split()
        )
    assert notes == {"h100": True, "v100": False}
    first, last = (rows_of("resnet")[layout]["median_seconds"] for layout in ("", "channels_last"))
    assert first / last == pytest.approx(1.8, abs=0.05)
    layout = torch.channels_last
    last = OwnModel("last", (3, 16, 16), function=lambda: torch.nn.Conv2d(3, 4, 3).to(memory_format=layout))
    assert not last.channels_first


def rows_of(part) -> dict:
    """What the records of the H100 have of a part, by the options of each variant."""
    rows = next(found["rows"] for found in page.newest()["parts"] if found["part"] == part)
    return {" ".join(row["options"]): row for row in rows}


@pytest.mark.parametrize(("model", "part", "variants", "bar"), [
    ("GPT 1B", "gpt", ["", "checkpointing", "compile", "checkpointing compile"], 0.05),
    pytest.param("ResNet-50", "resnet", ["channels_last", "channels_last compile"], 0.15, marks=pytest.mark.nightly),
])  # fmt: skip
def test_what_an_h100_measured_is_what_was_planned(model, part, variants, bar, monkeypatch):
    """Eager and compiled; the GPT of a billion weights has PyTorch's default AdamW, and ResNet-50 its channels last."""
    monkeypatch.syspath_prepend(root() / "tests/bench")
    published = import_module("published")
    run = next(run for run in published.runs() if (run.source, run.model) == ("our H100", model))
    planned, measured = published.model_of(run), rows_of(part)
    for variant in variants:
        row, compiled = measured[variant], "compile" in variant
        again = own.RECOMPUTED if "checkpointing" in variant else ""
        of_step = published.planned(run._replace(again=again, compiled=compiled), planned)
        seconds, (low, high) = of_step.compiled if compiled else of_step.seconds, of_step.between
        assert seconds == pytest.approx(row["median_seconds"], rel=bar), variant
        assert low < row["median_seconds"] < high, variant
        within = 0.1 if compiled else 0.01
        assert of_step.memory / 2**30 == pytest.approx(row["peak_memory_gib"], rel=within), variant


@pytest.fixture(scope="module")
def small():
    """A small model of equal blocks, on a device alone."""
    return OwnModel("llama", (32,), True, llama)


def found(request, **way):
    """What the plan says of a model on every device, and between which times it may be."""
    return own.with_times(request, partial(own.replicated, parts=(1,), **way))


def test_each_class_slows_its_own_kernels_down(small):
    request, step = PlanRequest(small, 4, efficiency=AT_BEST), own.steps_of(PlanRequest(small, 4), 4).at(4)
    at_best, of_class = found(request), {}
    for kind in range(len(KINDS)):
        halved = tuple(0.5 if number == kind else 1.0 for number in range(len(KINDS)))
        of_class[kind] = found(replace(request, efficiency=AT_BEST._replace(fractions=halved))).seconds
    assert {kind for kind, seconds in of_class.items() if seconds > at_best.seconds} == {
        PRODUCT, ATTENTION, MEMORY, OPTIMIZER,
    }  # fmt: skip
    # and the optimizer's
    launches = sum(map(len, step.work.values())) * roof("a100").launch + roof("a100").launch
    all_halved = found(replace(request, efficiency=AT_BEST._replace(fractions=(0.5,) * len(KINDS))))
    assert all_halved.seconds == pytest.approx(2 * at_best.seconds - launches)


def test_the_optimizer_is_a_phase_of_its_own_once_in_a_step(small):
    times = {}
    for optimizer in ("sgd", "adamw"):
        request = PlanRequest(small, 8, optimizer=optimizer, efficiency=AT_BEST)
        times[optimizer] = [own.replicated(request, parts=(parts,)).seconds for parts in (1, 4)]
    values = small.trained / 4
    moved = 4 * values * (20 - 3) / roof("a100").moved  # AdamW's foreach kernels move 20 numbers, SGD's 3
    once, in_parts = (a - b for a, b in zip(times["adamw"], times["sgd"], strict=True))
    assert once == pytest.approx(moved) and in_parts == pytest.approx(moved)


def test_products_reach_what_their_size_reaches():
    efficiency = Efficiency("", sizes=((1e6, 0.2), (1e8, 0.6)))
    of = efficiency.computing(np.full(4, PRODUCT), np.array([1, 1e6, 1e7, 1e12]))
    assert of.tolist() == pytest.approx([0.2, 0.2, 0.4, 0.6])
    assert efficiency.computing(np.array([ATTENTION]), np.array([1e6])) == 1.0


def test_the_interval_reaches_from_fused_kernels_to_slow_ones_without_a_cap(small):
    known = AT_BEST._replace(fractions=(0.5,) * len(KINDS))
    ends = {}
    for spread in (0.0, 0.1, 3.0):
        asked = PlanRequest(small, 2**12, efficiency=known._replace(spreads=(spread,) * len(KINDS)))
        of_step = found(asked)
        ends[spread] = [end / of_step.seconds for end in of_step.between]
    compiled = of_step.compiled / of_step.seconds
    assert ends[0.0] == [] and COMPILED < compiled < 1
    assert ends[0.1] == pytest.approx([compiled / 1.1, 1.1], abs=0.02)
    assert ends[3.0][1] == pytest.approx(4, abs=0.2)  # launching takes no longer
    of_compiled = found(replace(asked, compiled=True))
    assert of_compiled.between[1] < of_step.between[1] and of_compiled.memory < of_step.memory
    assert found(PlanRequest(small, 8, gpu="l40s")).between == ()

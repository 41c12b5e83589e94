"""What is counted of a reader's own model without computing it: against real steps, and for models of 8B and 70B."""

import subprocess
import sys

import pytest
from project import root

from mpdemo.tools.plan import own, own_scaling
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.request import PlanRequest

FILE = f"{root()}/tests/programs/llama.py"
LENGTH = 256


def steps(name, batch=4, length=LENGTH, **way):
    model = OwnModel(f"{FILE}:{name}", (length,), tokens=True)
    return own.steps_of(PlanRequest(model, batch, optimizer="adamw"), batch, **way)


@pytest.mark.parametrize(("name", "way"), [
    ("tied_20m", {}),
    ("untied_20m", {"half": "autocast", "checkpointing": True}),
    pytest.param("untied_20m", {"checkpointing": True, "selective": True}, marks=pytest.mark.nightly),
    ("bf16_20m", {}),
])  # fmt: skip
def test_a_step_that_is_not_computed_holds_what_the_allocator_of_a_real_one_says(name, way):
    from programs.real_step import measured

    real = {"bf16" if key == "half" else key: bool(value) for key, value in way.items()}
    assert steps(name, **way).at(4).peak == pytest.approx(
        measured(name, 4, LENGTH, **real)["peak"], rel=0.05
    )


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"shards": 2, "half": "bf16", "checkpointing": True},
        {"tensor": 2},
        pytest.param({"held": True, "rank": 16}, marks=pytest.mark.nightly),
        # recomputed as it was computed
        {"half": "bf16", "checkpointing": True, "compiled": True},
    ],
)
def test_few_blocks_tell_what_all_of_them_need(way):
    """FSDP gathers the second block before the first is computed, so its peak is at another block than DDP's."""
    line = steps("tied_20m", batch=2, **way)
    few, every = line.at(2), own_scaling.computed(*line, line.model.count)
    for name in ("peak", "weights", "trained"):
        assert getattr(few, name) == pytest.approx(getattr(every, name), rel=1e-6), (way, name)
    assert {k: tuple(v) for k, v in few.sent.items()} == {k: tuple(v) for k, v in every.sent.items()}
    assert sum(map(len, every.work.values())) == sum(
        len(few.work[n]) * (4 if "inner" in n else 1) for n in few.work
    )


def test_other_batches_lie_on_the_line_of_two():
    found = steps("untied_20m")
    for size in (2, 24):
        assert found.at(size).peak == pytest.approx(
            own_scaling.whole_step(*found[:3], size).peak, rel=0.001
        )
    assert found.at(found.most(2**31)).peak <= 2**31 < found.at(found.most(2**31) + 1).peak


def test_a_model_of_eight_billion_weights_is_planned_without_any_of_them():
    weights = sum(p.nbytes for p in OwnModel(f"{FILE}:short_8b", (8,), True).template.parameters())
    found = steps("short_8b", batch=1, length=2048, shards=8, half="bf16", checkpointing=True)
    assert found.at(1).weights == pytest.approx(weights / 8, rel=0.001)
    assert found.at(1).peak > 4 * weights / 8


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "words", "answer"),
    [
        ("llama_8b", ("--devices", "8", "--batch", "8"), "fsdp, bf16: "),
        (
            "llama_70b",
            ("--devices", "64", "--nodes", "8", "--batch", "64"),
            "fsdp, bf16, recomputed: ",
        ),
    ],
)
def test_8b_and_70b_are_planned_within_4_gib_and_a_minute_of_the_processor(name, words, answer):
    """Here in 0.7 GiB and 25 s. Not by the clock: other tests share the cores."""
    options = f"--model {FILE}:{name} --input 4096 --tokens --optimizer adamw --gpu h100".split()
    command = [
        "prlimit",
        f"--data={4 * 2**30}",
        "--cpu=60",
        sys.executable,
        "-m",
        "mpdemo",
        "plan",
        *options,
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=root())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(answer)
    left_out = [line for line in done.stdout.splitlines() if line.startswith("note: not planned:")]
    assert all(" between the nodes" in line or "states alone need" in line for line in left_out), left_out

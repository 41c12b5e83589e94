"""Where the planner splits a model, and ``mpdemo plan`` as a user meets it."""

import json
import random
from itertools import combinations

import pytest

from mpdemo.errors import UserError
from mpdemo.tools.plan import own, strategies
from mpdemo.tools.plan import split as planner
from mpdemo.tools.plan.command import PlanOptions, request_of
from mpdemo.tools.plan.roof import MIB

COMMAND = "plan --model resnet18 --batch 32 --image-size 64"
LIMITS = "--devices 2 --gpu v100 --gpu-memory 16GiB"


def test_the_command_prints_every_strategy_and_writes_json(call_mpdemo, tmp_path):
    path = tmp_path / "plan.json"
    done = call_mpdemo(*f"{COMMAND} {LIMITS} --optimizer adamw --json {path}".split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ddp: Each of 2 devices holds the whole model")
    rows = json.loads(path.read_text())["rows"]
    assert {"ddp", "fsdp", "pipeline", "ddp, LoRA, bf16, activation checkpointing"} <= {
        row["strategy"] for row in rows if row["fits"]
    }
    shown = done.stdout.split()
    for row in rows:
        assert row["memory_mib"] is None or f"{row['memory_mib']:,.0f}" in shown
        assert row["seconds"] is None or f"{1000 * row['seconds']:,.1f}" in shown


def test_the_row_of_a_pipeline_has_the_memory_of_each_stage_and_that_of_a_long_one_its_fullest_alone(
    monkeypatch,
):
    options = PlanOptions(model="resnet18", batch=32, image_size=64, devices=2, gpu="v100")
    request = request_of(options, print)
    found = own.pipeline(request)
    assert len(found.stages) == 2 and found.memory == max(found.stages)
    pipeline = strategies.Strategy(own.Rule("pipeline", "", None), True, found)
    first, second = (f"{peak / MIB:,.0f}" for peak in found.stages)
    *_, row, below = strategies.table(request, [pipeline]).splitlines()
    assert row.split()[1:4] == ["pipeline", "yes", first] and below.split() == [second]
    assert strategies.as_rows(request, [pipeline])[0]["stages_mib"] == [peak / MIB for peak in found.stages]
    monkeypatch.setattr(own, "STAGES_SHOWN", 1)
    long = own.pipeline(request)
    assert long.stages == () and long.memory in found.stages


@pytest.mark.parametrize(
    "words, message",
    [
        (f"--model resnet19 {LIMITS}", "allowed: "),
        (
            "--devices 0 --gpu-memory 16GiB",
            "--devices 0 is not allowed: it should be greater than or equal to 1",
        ),
        ("--gpu-memory 16GiB", "--devices is missing; say how many devices there are, such as --devices 8"),
        ("--devices 2", "--gpu is missing; say what the devices are, v100, a100, "),
        ("--devices 2 --gpu-memory 16", "such as 16GiB"),
        (
            "--devices 2 --gpu a100 --total 90x",
            "--total '90x': allowed: how many tokens or images, such as 300e9",
        ),
        ("--devices 2 --gpu a100 --total 1e999", "or epochs x images, such as 90x1281167"),
        (
            "--devices 2 --gpu a100 --total 3e9 --price -1",
            "--price -1 is not allowed: it should be greater than 0",
        ),
        ("--devices 2 --gpu a100 --price 2", "--price is that of a whole run; say how long it is"),
        ("--devices 2 --gpu-memory 512MiB", "allowed: 1GiB or more"),
        ("--devices 3 --gpu-memory 16GiB", "a batch of 32 does not divide by 3 devices"),
        (
            "--devices 2 --gpu h1000",
            "allowed: v100, a100, a100-80, h100, h200, b200, l40s, rtx4090, mi300x; did you",
        ),
    ],
)
def test_bad_input_is_one_line_with_the_valid_values(call_mpdemo, words, message):
    done = call_mpdemo(*f"{COMMAND} {words}".split())
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        message in done.stderr
        and done.stderr.count("\n") == 1
        and done.stderr.startswith("mpdemo: error: ")
    )


def test_a_misspelt_option_in_python_gets_the_nearest_name():
    with pytest.raises(UserError, match="unknown name 'devics'; allowed: .*did you mean 'devices'"):
        PlanOptions(model="resnet18", devics=2)


def slowest_stage(costs, points):
    edges = [0, *points, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_has_a_faster_slowest_stage(seed):
    draw = random.Random(seed)
    costs = [draw.choice([0.1, 1, 2, 5]) * draw.random() for _ in range(draw.randint(2, 9))]
    stages = draw.randint(1, min(4, len(costs)))
    every = [list(points) for points in combinations(range(1, len(costs)), stages - 1)]
    points_chosen = planner.balanced_cut(costs, stages)
    assert points_chosen in every
    assert slowest_stage(costs, points_chosen) == pytest.approx(
        min(slowest_stage(costs, points) for points in every)
    )


def test_hundreds_of_stages():
    assert planner.balanced_cut([1.0] * 200, 100) == list(range(2, 200, 2))

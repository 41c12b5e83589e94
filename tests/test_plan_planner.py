"""Where the planner splits a model, and ``mpdemo plan`` as a user meets it."""

import json
import random
from dataclasses import replace
from itertools import combinations

import pytest

from mpdemo.errors import UserError
from mpdemo.predict import footprint, planner
from mpdemo.predict.footprint import MIB, RESERVE, ModelSpec
from mpdemo.predict.planner import SplitRequest
from mpdemo.tools.plan import own, strategies
from mpdemo.tools.plan.command import PlanOptions, request_of
from mpdemo.world.gpus import GPUS

COMMAND = "plan --model resnet18 --batch 32 --image-size 64"
LIMITS = "--devices 2 --gpu v100 --gpu-memory 16GiB"
CASE = SplitRequest(ModelSpec("resnet18", image_size=64), 32, 2, "v100")


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_no_other_cut_is_faster(schedule):
    stages = 2 if schedule != "ZBVZeroBubble" else 4
    every = [list(points) for points in combinations(range(1, len(CASE.blocks())), stages - 1)]
    for microbatches in (4, 8):
        chosen = planner.best_split(CASE, schedule, microbatches)
        best = min(planner.evaluate(CASE, schedule, microbatches, points).step_time for points in every)
        assert chosen.step_time <= 1.03 * best


def test_with_little_memory_the_split_changes_and_still_fits():
    free = planner.best_split(CASE, "GPipe", 8)
    tight = replace(CASE, memory=RESERVE + 0.9 * max(free.peaks))
    chosen = planner.best_split(tight, "GPipe", 8)
    assert max(chosen.peaks) <= tight.limit < max(free.peaks)
    assert chosen.points != free.points and chosen.step_time >= free.step_time


@pytest.mark.parametrize(("devices", "even"), [(3, [3, 7]), (4, [2, 5, 8])])
def test_three_and_four_devices(devices, even):
    more = replace(CASE, devices=devices)
    best = planner.best_split(more, "1F1B", 8)
    assert best.simulation.ranks == devices
    assert best.step_time < planner.evaluate(more, "1F1B", 8, even).step_time


@pytest.mark.parametrize(
    ("devices", "schedule", "microbatches", "message"),
    [
        (50, "GPipe", 8, "50 stages do not fit a model of 10 blocks; allowed: 1 to 10"),
        (2, "1F1B", 5, "a batch of 32 does not divide into 5 microbatches"),
        (4, "1F1B", 2, "1F1B needs at least as many microbatches as stages"),
        (2, "1F1", 8, "1F1B"),
    ],
)
def test_a_split_that_cannot_be_is_refused(devices, schedule, microbatches, message):
    with pytest.raises(UserError, match=message):
        planner.best_split(replace(CASE, devices=devices), schedule, microbatches)


@pytest.mark.parametrize(("gpu", "share"), [("v100", 0.285), ("a100", 0.36), ("h100", 0.35)])
def test_the_usual_cut_of_resnet101_is_unbalanced_on_every_gpu(gpu, share):
    """Measured on a CPU, the blocks up to layer2 are 0.285 of the work, which a GPU without TF32 should confirm.

    TF32 speeds up the convolutions alone, so reading and writing the large early activations weighs more.
    """
    seconds = [block.both for block in footprint.costs(ModelSpec("resnet101"), 16, gpu)]
    assert sum(seconds[:8]) / sum(seconds) == pytest.approx(share, abs=0.02)


def test_an_a100_computes_convolutions_in_tf32_and_other_products_in_float32():
    def estimate(model):
        return sum(block.both for block in footprint.costs(ModelSpec(model), 64, "a100"))

    def at_the_peak_of_float32(model):
        blocks = footprint.footprints(ModelSpec(model))
        work = [kernels @ (1, 64) for block in blocks for kernels in block.work.values()]
        return sum(kernels[:, :2].sum() for kernels in work) / GPUS["a100"].peaks["fp32"]

    assert estimate("resnet18") < at_the_peak_of_float32("resnet18")
    assert at_the_peak_of_float32("transformer") < estimate("transformer")


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


def test_the_row_of_a_pipeline_has_the_memory_of_each_stage_and_that_of_a_long_one_its_fullest_alone(monkeypatch):
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
        ("--devices 0 --gpu-memory 16GiB", "--devices 0 is not allowed: it should be greater than or equal to 1"),
        ("--gpu-memory 16GiB", "--devices is missing; say how many devices there are, such as --devices 8"),
        ("--devices 2", "--gpu is missing; say what the devices are, v100, a100, "),
        ("--devices 2 --gpu-memory 16", "such as 16GiB"),
        ("--devices 2 --gpu a100 --total 90x", "--total '90x': allowed: how many tokens or images, such as 300e9"),
        ("--devices 2 --gpu a100 --total 1e999", "or epochs x images, such as 90x1281167"),
        ("--devices 2 --gpu a100 --total 3e9 --price -1", "--price -1 is not allowed: it should be greater than 0"),
        ("--devices 2 --gpu a100 --price 2", "--price is that of a whole run; say how long it is"),
        ("--devices 2 --gpu-memory 512MiB", "allowed: 1GiB or more"),
        ("--devices 3 --gpu-memory 16GiB", "a batch of 32 does not divide by 3 devices"),
        ("--devices 2 --gpu h1000", "allowed: v100, a100, a100-80, h100, h200, b200, l40s, rtx4090, mi300x; did you"),
    ],
)
def test_bad_input_is_one_line_with_the_valid_values(call_mpdemo, words, message):
    done = call_mpdemo(*f"{COMMAND} {words}".split())
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("mpdemo: error: ")


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
    assert slowest_stage(costs, points_chosen) == pytest.approx(min(slowest_stage(costs, points) for points in every))


def test_hundreds_of_stages():
    assert planner.balanced_cut([1.0] * 200, 100) == list(range(2, 200, 2))


def test_improve_walks_to_the_cut_with_the_lowest_score():
    costs = [1, 1, 1, 5, 1, 1, 1, 1]
    assert planner.improve([1], len(costs), lambda points: slowest_stage(costs, points)) == [4]


def test_improve_moves_neighbouring_boundaries_together():
    """Only all three boundaries moved at once lower this score."""
    assert planner.improve([3, 5, 7], 9, lambda points: 0 if points == [4, 6, 8] else 1) == [4, 6, 8]

"""The planner's choice, and ``python -m mpdemo plan`` as a user meets it."""

import json
import random
from dataclasses import replace
from itertools import combinations

import pytest

from mpdemo.__main__ import main
from mpdemo.errors import UserError
from mpdemo.plan import footprint, planner
from mpdemo.plan.case import Case
from mpdemo.plan.command import plan
from mpdemo.plan.subject import RESERVE, Subject
from mpdemo.world.devices import PEAKS

COMMAND = "plan --model resnet18 --batch 32 --image-size 64 --cost v100"


CASE = Case("resnet18", batch=32, devices=2, image_size=64, optimizer="sgd", memory=float("inf"), gpu="v100")


def run(capsys, words):
    status = main(words.split())
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_no_other_cut_is_faster(schedule):
    stages = 2 if schedule != "ZBVZeroBubble" else 4
    every = [list(points) for points in combinations(range(1, len(CASE.blocks())), stages - 1)]
    for microbatches in (4, 8):
        chosen = planner.candidates(CASE, [schedule], [microbatches])[0]
        best = min(planner.evaluate(CASE, schedule, microbatches, points).step_time for points in every)
        assert chosen.step_time <= 1.03 * best


def test_with_little_memory_the_plan_changes_and_still_fits():
    free = planner.candidates(CASE)[0]
    tight = replace(CASE, memory=RESERVE + 0.7 * max(free.peaks))
    chosen = planner.candidates(tight)[0]
    assert max(chosen.peaks) <= tight.limit < max(free.peaks)
    assert chosen.step_time >= free.step_time / 1.01


@pytest.mark.parametrize("devices", [3, 4])
def test_three_and_four_devices(devices):
    more = replace(CASE, devices=devices)
    best = planner.candidates(more)[0]
    assert best.simulation.ranks == devices
    assert best.step_time < more.one_device_seconds


@pytest.mark.parametrize(("gpu", "share"), [("v100", 0.285), ("a100", 0.36), ("h100", 0.35)])
def test_the_usual_cut_of_resnet101_is_unbalanced_on_every_gpu(gpu, share):
    """Measured on a CPU, the blocks up to layer2 are 0.285 of the work, which a GPU without TF32 should confirm.

    TF32 speeds up the convolutions alone, so reading and writing the large early activations weighs more.
    """
    seconds = [block.both for block in footprint.costs(Subject("resnet101"), 16, gpu)]
    assert sum(seconds[:8]) / sum(seconds) == pytest.approx(share, abs=0.02)


def test_an_a100_computes_convolutions_in_tf32_other_products_in_float32_and_all_in_bf16():
    def estimate(model, precision, gpu="a100"):
        return sum(block.both for block in footprint.costs(Subject(model), 64, gpu, precision))

    def at_the_peak_of_float32(model):
        work = [kernels @ (1, 64) for block in footprint.footprints(Subject(model)) for kernels in block.work.values()]
        return sum(kernels[:, :2].sum() for kernels in work) / PEAKS["a100"]["fp32"]

    assert estimate("resnet18", "bf16") < estimate("resnet18", "fp32") < at_the_peak_of_float32("resnet18")
    assert estimate("transformer", "bf16") < at_the_peak_of_float32("transformer") < estimate("transformer", "fp32")
    assert estimate("transformer", "bf16", "v100") == 0  # it has no units for bf16, so nothing is estimated


def test_the_command_prints_everything_and_writes_json(capsys, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = run(capsys, f"{COMMAND} --gpu-memory 16GiB --json {path}")
    assert (status, err) == (0, "")
    for word in ("share of work", "parameters", "weights", "gradients", "optimizer", "activations"):
        assert word in out
    rows = json.loads(path.read_text())["rows"]
    assert [row["strategy"].split()[0] for row in rows] == ["plan:", "usual", "best", "best", "best", "best"]
    assert rows[1]["strategy"].startswith("usual cut (layer2.1): ")
    assert rows[0]["seconds"] < rows[1]["seconds"] and all(row["fits"] for row in rows)
    for row in rows:
        assert f" {row['memory_mib']:,.0f} " in out and f" {1000 * row['seconds']:,.1f} " in out
    parameters = [int(line.split()[-1].replace(",", "")) for line in out.splitlines() if " to " in line[:40]]
    assert sum(parameters) == 11_689_512  # torchvision's ResNet-18
    assert f"--schedule {rows[0]['strategy'].split()[1].rstrip(',')} --microbatches " in out


def test_what_the_user_fixes_is_kept(capsys):
    status, out, _ = run(capsys, f"{COMMAND} --schedule 1F1B --microbatches 4 --cut layer2.1 --optimizer momentum")
    assert status == 0 and "--schedule 1F1B --microbatches 4 --cut layer2.1" in out
    devices = [line.split() for line in out.partition("peak (MiB)")[2].splitlines()[2:4]]
    assert all(int(optimizer) > 0 for _, _, _, optimizer, _, _ in devices)


def test_memory_that_nothing_fits_is_refused_saying_what_would(capsys):
    words = "plan --model resnet101 --batch 128 --image-size 224 --gpu-memory 1500MiB --schedule GPipe --microbatches 2"
    status, _, err = run(capsys, words)
    assert status == 2
    assert "no plan fits" in err and "is over by" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ("--model resnet19", "allowed: "),
        ("--stages 0", "--stages 0 is not allowed; allowed: 2 or more"),
        ("--stages 50", "allowed: 1 to 10"),
        ("--cut layer9", "cannot cut after 'layer9'"),
        ("--cut 0", "allowed: a number from 1 to 9"),
        ("--schedule ZBVZeroBubble --cut 5,3,8", "not increasing"),
        ("--microbatches 5", "or other --microbatches"),
        ("--batch 67 --stages 3 --schedule 1F1B", "a divisor from 3 to 64"),
        ("--schedule 1F1", "allowed: GPipe, 1F1B"),
        ("--budget inf", "--budget inf is not allowed; allowed: 86400.0 or less"),
        ("--gpu-memory 16", "such as 16GiB"),
        ("--gpu-memory 512MiB", "allowed: 1GiB or more"),
        ("--budget 5", "--budget is for --cost measure, not v100; leave it out"),
    ],
)
def test_bad_input_is_one_line_with_the_valid_values(capsys, words, message):
    status, out, err = run(capsys, f"{COMMAND} {words}")
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1 and err.startswith("mpdemo: error: ")


def test_a_misspelt_option_in_python_gets_the_nearest_name():
    with pytest.raises(UserError, match="unknown name 'stags'; allowed: .*did you mean 'stages'"):
        plan(model="resnet18", stags=2)


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

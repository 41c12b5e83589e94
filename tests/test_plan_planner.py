"""The planner's choice, and ``python -m mpdemo plan`` as a user meets it."""

import json
from dataclasses import replace
from itertools import combinations

import pytest

from mpdemo.__main__ import main
from mpdemo.errors import UserError
from mpdemo.plan import planner
from mpdemo.plan.command import plan
from mpdemo.plan.footprint import estimate, footprints

COMMAND = "plan --model resnet18 --batch 32 --image-size 64 --cost v100"


@pytest.fixture(scope="module")
def job():
    sizes = (1, 2, 4, 8, 16, 32)
    blocks, costs = footprints("resnet18", 64), estimate("resnet18", sizes, 64, "v100")
    return planner.Workload(blocks, costs, ranks=2, batch=32)


def run(capsys, words):
    status = main(words.split())
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_no_other_cut_is_faster(job, schedule):
    stages = 2 if schedule != "ZBVZeroBubble" else 4
    every = [list(points) for points in combinations(range(1, len(job.blocks)), stages - 1)]
    for microbatches in (4, 8):
        chosen = planner.candidates(job, [schedule], [microbatches])[0]
        best = min(planner.evaluate(job, schedule, microbatches, points).step_time for points in every)
        assert chosen.step_time <= 1.03 * best


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_the_first_stage_does_its_whole_backward_as_weight_gradient(job, schedule):
    costs = {8: [c._replace(backward=0.9 * c.backward) for c in job.costs[8]]}  # its halves together cost more
    job = replace(job, costs=costs)
    played = planner.evaluate(job, schedule, 4, [3, 5, 7]).simulation
    rows = [row for row in played.events if row["microbatch"] == 0]
    seconds = {(row["kind"], row["stage"]): row["end"] - row["start"] for row in rows}
    first, second = job.costs[8][:3], job.costs[8][3:5]
    assert seconds["I", 0] == 0
    assert seconds["W", 0] == pytest.approx(sum(cost.backward for cost in first))
    assert seconds["I", 1] == pytest.approx(sum(cost.input for cost in second))
    assert seconds["W", 1] == pytest.approx(sum(cost.weight for cost in second))


def test_with_little_memory_the_plan_changes_and_still_fits(job):
    free = planner.choose(planner.candidates(job), job.limit)
    limit = 0.7 * max(free.peaks)
    tight = planner.Workload(job.blocks, job.costs, job.ranks, job.batch, limit)
    chosen = planner.choose(planner.candidates(tight), limit)
    assert max(chosen.peaks) <= limit < max(free.peaks)
    assert chosen.step_time >= free.step_time / 1.01


def test_three_and_four_devices(job):
    for ranks in (3, 4):
        more = planner.Workload(job.blocks, job.costs, ranks, job.batch)
        best = planner.choose(planner.candidates(more), more.limit)
        assert best.simulation.ranks == ranks
        assert best.step_time < planner.one_device_step_time(more)


def test_the_command_prints_everything_and_writes_json(capsys, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = run(capsys, f"{COMMAND} --gpu-memory 16GiB --json {path}")
    assert (status, err) == (0, "")
    for word in (
        "share of work",
        "parameters",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "usual cut (layer2.1)",
    ):
        assert word in out
    plan = json.loads(path.read_text())
    assert sum(stage["share"] for stage in plan["stages"]) == pytest.approx(1)
    assert sum(stage["parameters"] for stage in plan["stages"]) == 11_689_512  # torchvision's ResNet-18
    assert plan["step_time"] < plan["usual"]["step_time"]
    assert all(device["peak"] < 16 * 2**30 for device in plan["devices"])
    assert f"--schedule {plan['schedule']} --microbatches {plan['microbatches']} --cut {','.join(plan['cut'])}" in out


def test_what_the_user_fixes_is_kept(capsys, tmp_path):
    path = tmp_path / "plan.json"
    fixed = "--schedule 1F1B --microbatches 4 --cut layer2.1 --optimizer momentum"
    assert run(capsys, f"{COMMAND} {fixed} --json {path}")[0] == 0
    plan = json.loads(path.read_text())
    assert (plan["schedule"], plan["microbatches"], plan["cut"]) == ("1F1B", 4, ["layer2.1"])
    assert all(device["optimizer"] > 0 for device in plan["devices"])


def test_measuring_on_this_machine_in_one_process_form(capsys):
    words = (
        "plan --model convnet --channels 1 --classes 10 --image-size 28 --batch 8 --microbatches 2 --form one-process"
    )
    status, out, _ = run(capsys, words)
    assert status == 0
    assert "measured on one device of this machine" in out and "--form one-process" in out


def test_memory_that_nothing_fits_is_refused_saying_what_would(capsys):
    words = "plan --model resnet101 --batch 128 --image-size 224 --gpu-memory 1500MiB --schedule GPipe --microbatches 2"
    status, _, err = run(capsys, words)
    assert status == 2
    assert "no plan fits" in err and "is over by" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ("--model resnet19", "allowed: "),
        ("--stages 0", "--stages 0 is not allowed; allowed: 1 or more"),
        ("--stages 50", "allowed: 1 to 10"),
        ("--cut layer9", "cannot cut after 'layer9'"),
        ("--cut 0", "allowed: a number from 1 to 9"),
        ("--cut 10", "allowed: a number from 1 to 9"),
        ("--schedule ZBVZeroBubble --cut 5,3,8", "not increasing"),
        ("--schedule ZBVZeroBubble --cut 3,3,8", "leaves a stage empty"),
        ("--stages 4 --schedule 1F1B --microbatches 2", "4 or more"),
        ("--microbatches 5", "allowed: 1, 2, 4, 8, 16, 32"),
        ("--batch 67 --stages 3 --schedule 1F1B", "a divisor from 3 to 64"),
        ("--schedule 1F1", "allowed: GPipe, 1F1B"),
        ("--microbatches four", "allowed: a whole number"),
        ("--budget -1", "--budget -1 is not allowed; allowed: 0.0 or more"),
        ("--gpu-memory 16", "such as 16GiB"),
        ("--gpu-memory 512MiB", "allowed: 1GiB or more"),
        ("--cost rtx", "allowed: measure, v100, a100, h100"),
        ("--form both", "allowed: per-device, one-process"),
        ("--form one-process --schedule ZBVZeroBubble", "allowed: GPipe"),
        ("--optimizer adagrad", "allowed: sgd, momentum, adamw"),
        ("--norm layer", "allowed: batch, group"),
    ],
)
def test_bad_input_is_one_line_with_the_valid_values(capsys, words, message):
    status, out, err = run(capsys, f"{COMMAND} {words}")
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1 and err.startswith("mpdemo: error: ")


def test_a_misspelt_option_in_python_gets_the_nearest_name():
    with pytest.raises(UserError, match="unknown name 'stags'; allowed: .*did you mean 'stages'"):
        plan(model="resnet18", stags=2)

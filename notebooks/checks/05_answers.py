"""Checks of notebook 05: a loop over microbatches, an order of your own, a command, split points."""

import re
import shlex
import tempfile
from itertools import pairwise
from pathlib import Path

from checks.job_files import told
from mpdemo import ranks
from mpdemo.paths import root


def check_05_1(step):
    import torch
    from torch import nn

    from checks.helpers import MISSING, close, ratio

    sizes = []
    for microbatches in (3, 4):
        when = f"With {microbatches} microbatches"
        sizes.clear()
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3)]
        images, labels = torch.randn(12, 4), torch.randint(0, 3, (12,))
        weights = [list(stage.parameters()) for stage in stages]
        loss = nn.functional.cross_entropy(stages[1](stages[0](images)), labels)
        right = [torch.autograd.grad(loss, of_stage, retain_graph=True) for of_stage in weights]
        for number, stage in enumerate(stages):
            stage.register_forward_hook(lambda _, inputs, __, number=number: sizes.append((number, len(inputs[0]))))
        try:
            step(*stages, nn.functional.cross_entropy, images, labels, microbatches)
        except (RuntimeError, TypeError) as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
            raise AssertionError(f"{when} it fails: {said}.") from None
        for number in (0, 1):
            seen = [size for stage, size in sizes if stage == number]
            wanted = [12 // microbatches] * microbatches
            assert seen == wanted, f"{when} stage {number} computed batches of {seen} images."
            times = ratio([parameter.grad for parameter in weights[number]], right[number])
            assert times != MISSING, f"{when}, on stage {number}, a weight has no gradient."
            many = f"{when}, on stage {number}, the gradients"
            assert times is not None, f"{many} don't even point in the direction of the whole batch's."
            mean = f"{many} are {times:.2f} times the whole batch's. Its loss is a mean."
            assert close(times, 1, 0.005), mean


def check_05_4(orders):
    from mpdemo.plan.simulate import simulate_order

    assert len(orders) == 3, f"There are three stages, and this answer has {len(orders)} lists."
    with told("It doesn't run"):
        rows = simulate_order(orders)
    count = 1 + max(row["microbatch"] for row in rows)
    assert count == 4, f"There are four microbatches, and this order has {count}."
    for stage, (limit, order) in enumerate(zip((3, 2, 1), orders, strict=True)):
        most = max(sum(1 if name[0] == "F" else -1 for name in order[:end]) for end in range(len(order) + 1))
        assert most <= limit, f"It runs, but stage {stage} holds {most} microbatches and has memory for {limit}."
    step = max(row["end"] for row in rows)
    assert step <= 18, f"It runs and fits, but takes {step:g} units. 1F1B takes 18."


def check_05_7(answer):
    costs, points = [4, 2, 2, 3, 1, 1, 5, 2], [int(point) for point in answer]
    assert len(points) == 2, f"Three stages need two split points, and this answer has {len(points)}."
    edges = [0, *points, len(costs)]
    empty = f"The split points {points} leave a stage without a block."
    assert all(start < stop for start, stop in pairwise(edges)), empty
    sums = [sum(costs[start:stop]) for start, stop in pairwise(edges)]
    slow = f"The stages take {', '.join(map(str, sums))} ms. A slowest stage of less than {max(sums)} ms is possible."
    assert max(sums) <= 7, slow


def check_05_9(answer):
    words = shlex.split(answer)
    assert not any("," in word for word in words), "The script takes the numbers after --cut with spaces between them."
    script = root() / "notebooks/scripts/train_pipeline.py"
    with tempfile.TemporaryDirectory(prefix="mpdemo-exercise-") as folder:
        options = ["--epochs", "1", "--checkpoint", f"{folder}/model", *words]
        start = f"sys.argv = {[str(script), *options]!r}\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
        results = ranks.run_program(f"import runpy, sys\n{start}", "", world_size=3, timeout=40, group=False)
        for printed, _, error in results:
            refused = printed.strip().splitlines()[-1:] if error and "SystemExit" in error else [error]
            assert not error, re.sub(r" \(line \d+\)$", "", *refused)  # of a program that the reader doesn't see
        sizes = [count_of_weights(Path(folder, f"model-stage{stage}.pt")) for stage in range(3)]
    printed = results[2][0]
    assert "epoch 1: loss" in printed, f"It ran, and the last stage printed {printed[:60]!r}."
    assert all(sizes), f"It ran, and the stages have {sizes} weights: a stage without weights learns nothing."
    split = f"It ran, and the stages have {sizes} weights. Is each of the two blocks on one stage?"
    assert sizes == [384, 9312, 5130], split
    first_layers = [int(word) for word in words[words.index("--cut") + 1 :] if word.isdigit()][:2]
    assert first_layers == [3, 6], "It ran, but a layer without weights is on another stage than the task says."


def count_of_weights(path):
    import torch

    return sum(weight.numel() for weight in torch.load(path)["model"].values())

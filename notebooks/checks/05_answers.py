"""Checks of notebook 05: a loop over microbatches, an order of your own, a command, split points."""

import re
import shlex
import tempfile
from pathlib import Path

from checks.job_files import told
from mpdemo import ranks
from mpdemo.paths import root


def check_05_1(step):
    import torch
    from torch import nn

    from checks.helpers import gradients, require_gradients

    for microbatches in (3, 4):
        when, sizes = f"With {microbatches} microbatches", []
        torch.manual_seed(0)
        stages = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3))
        images, labels = torch.randn(12, 4), torch.randint(0, 3, (12,))
        nn.functional.cross_entropy(stages(images), labels).backward()
        right = gradients(stages)
        stages[1].register_forward_hook(lambda layer, inputs, outputs, sizes=sizes: sizes.append(len(inputs[0])))
        try:
            step(*stages, nn.functional.cross_entropy, images, labels, microbatches)
        except RuntimeError as error:
            raise AssertionError(f"{when} it fails: RuntimeError: {str(error).splitlines()[0]}.") from None
        assert sizes == microbatches * [12 // microbatches], f"{when} stage 1 computed batches of {sizes} images."
        require_gradients(gradients(stages), right, when)


def check_05_4(orders):
    from mpdemo.plan.simulate import simulate_order

    with told("It doesn't run"):
        rows = simulate_order(orders)
    size = len(orders), 1 + max(row["microbatch"] for row in rows)
    assert size == (3, 4), f"There are three stages and four microbatches; this order has {size[0]} and {size[1]}."
    for stage, (limit, order) in enumerate(zip((3, 2, 1), orders, strict=True)):
        most = max(sum(1 if name[0] == "F" else -1 for name in order[:end]) for end in range(len(order) + 1))
        assert most <= limit, f"It runs, but stage {stage} holds {most} microbatches and has memory for {limit}."
    step = max(row["end"] for row in rows)
    assert step <= 18, f"It runs and fits, but takes {step:g} units. 1F1B takes 18."


def check_05_7(answer):
    costs, (first, second) = [4, 2, 2, 3, 1, 1, 5, 2], answer
    assert 0 < first < second < len(costs), f"The split points {answer} leave a stage without a block."
    sums = [sum(stage) for stage in (costs[:first], costs[first:second], costs[second:])]
    assert max(sums) <= 7, f"The stages take {', '.join(map(str, sums))} ms. Less than {max(sums)} ms is possible."


def check_05_9(answer):
    words = shlex.split(answer)
    script = root() / "notebooks/scripts/train_pipeline.py"
    with tempfile.TemporaryDirectory(prefix="mpdemo-exercise-") as folder:
        options = ["--epochs", "1", "--checkpoint", f"{folder}/model", *words]
        start = f"sys.argv = {[str(script), *options]!r}\nsys.path.insert(0, {str(script.parent)!r})\n"
        start += f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
        results = ranks.run_program(f"import runpy, sys\n{start}", "", world_size=3, timeout=40, group=False)
        for printed, _, error in results:
            refused = printed.strip().splitlines()[-1:] if error and "SystemExit" in error else [error]
            assert not error, re.sub(r" \(line \d+\)$", "", *refused)  # of a program that the reader doesn't see
        sizes = [count_of_weights(Path(folder, f"model-24-stage{stage}.pt")) for stage in range(3)]
    assert sizes == [384, 9312, 5130], f"The stages have {sizes} weights. Is each of the two blocks on one stage?"
    first_layers = [int(word) for word in words[words.index("--cut") + 1 :] if word.isdigit()][:2]
    assert first_layers == [3, 6], "It ran, but a layer without weights is on another stage than the task says."


def count_of_weights(path):
    import torch

    return sum(weight.numel() for weight in torch.load(path)["model"].values())

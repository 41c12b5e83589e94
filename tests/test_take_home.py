"""The scripts to take home: short, plain PyTorch, the same training however they are launched, run on a real Slurm."""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from mpdemo.jobs import check, slurm
from mpdemo.paths import root

FOLDER = root() / "notebooks" / "take_home"
SCRIPTS = root() / "notebooks" / "scripts"
DIGITS = root() / "mpdemo" / "data" / "digits.npz"
LIMITS = {"train_ddp.py": 70, "train_pipeline.py": 95, "split_any_model.py": 40}  # lines
# Sums in float32 in another order: the losses of one process and of two were equal to the six printed digits. A step
# left out (set_epoch, the average, the optimizer's state) changes them by 1e-3 and more.
TOLERANCE = 1e-5
ERRORS = [  # that the page quotes, and that one process can provoke; see programs/step_errors.py
    "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    "environment variable RANK expected, but not set",
    "EADDRINUSE",
    "1/2 clients joined",
    "device_ids and output_device arguments only work with single-device/multiple-device GPU modules",
    "sampler option is mutually exclusive with shuffle",
    'Missing key(s) in state_dict: "weight", "bias". Unexpected key(s) in state_dict: "module.weight", "module.bias".',
    "Expected to have finished reduction in the prior iteration before starting a new one",
    "PytorchStreamReader failed reading zip archive: failed finding central directory",
]


def environment(**more) -> dict:
    """Return the environment of a user's shell: no launcher's variables, this Python first in the path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | more


def run(folder, *command) -> str:
    """Run a command in a folder, for at most two minutes; return what it printed."""
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def launch(folder, script, *arguments, processes=1) -> str:
    """Run a script as its docstring says: plainly, or with two processes under torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return run(folder, sys.executable, *(launcher if processes > 1 else ()), FOLDER / script, *arguments)


def epochs(printed) -> dict:
    """Return {epoch: (loss, right answers)} of what a training printed."""
    rows = re.findall(r"epoch (\d+) loss ([\d.]+) correct (\d+)", printed)
    return {int(epoch): (float(loss), int(correct)) for epoch, loss, correct in rows}


def assert_same(rows, reference, numbers):
    assert sorted(rows) == list(numbers)
    for epoch, (loss, correct) in rows.items():
        assert loss == pytest.approx(reference[epoch][0], abs=TOLERANCE), f"loss of epoch {epoch}"
        assert abs(correct - reference[epoch][1]) <= 1, f"right answers of epoch {epoch}"  # one may lie on the border


def train_plainly(layers, mix, order, validated, microbatches=1) -> dict:
    """Train in this process, without anything of torch.distributed; return what `epochs` does.

    Parameters
    ----------
    layers : callable
        Returns the model's layers.
    mix : callable
        Returns the order in which the script divides its images, of so many.
    order : callable
        Returns the order of the 1,536 training images in an epoch.
    validated : int
        Number of validation images.
    """
    torch.manual_seed(0)
    data, mixed = np.load(DIGITS), mix(1797)
    images, labels = torch.from_numpy(data["images"])[mixed, None] / 16, torch.from_numpy(data["labels"])[mixed].long()
    model, rows = nn.Sequential(*layers()), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in (1, 2, 3, 4, 5):
        losses = []
        for batch in order(epoch).split(64):
            optimizer.zero_grad()
            for part in batch.chunk(microbatches):
                loss = nn.functional.cross_entropy(model(images[part]), labels[part]) / microbatches
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        answers = model(images[1536 : 1536 + validated]).argmax(1)
        rows[epoch] = (sum(losses) / 24, int((answers == labels[1536 : 1536 + validated]).sum()))
    return rows


def submit_and_wait(folder, command, *options) -> str:
    """Submit the batch script with a command in its last line, from a folder with the scripts; return its log."""
    for source in (FOLDER, SCRIPTS):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    text = (folder / "train.sbatch").read_text()
    assert len(text.splitlines()) == 20 and check(text, "throwaway", ask_slurm=False) == []
    text = text.replace("module load pytorch", "#").replace("train_ddp.py", command)
    (folder / "train.sbatch").write_text(text)
    job = run(folder, "sbatch", "--parsable", *options, "train.sbatch").strip()
    end = time.monotonic() + 120
    while (state := slurm.ask(job).state) in ("pending", "running"):
        assert time.monotonic() < end, f"the job is still {state}"
        time.sleep(0.2)
    log = next(folder.glob("*.out")).read_text()
    assert state == "done", log
    return log


@pytest.mark.parametrize("script", LIMITS)
def test_a_script_is_short_and_needs_nothing_of_this_package(script):
    source = (FOLDER / script).read_text()
    assert len(source.splitlines()) <= LIMITS[script]
    if script.startswith("train"):  # else dropout and batch norm would go on as in training
        assert 0 < source.index("model.train()") < source.index("model.eval()")
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] == "mpdemo"]


# --- DDP


@pytest.fixture(scope="module")
def undistributed():
    """The same training in this process. DistributedSampler's order is that of its seed, 0, plus the epoch."""
    return train_plainly(
        lambda: [nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)],
        lambda images: torch.randperm(images, generator=torch.Generator().manual_seed(0)),
        lambda epoch: torch.randperm(1536, generator=torch.Generator().manual_seed(epoch)),
        validated=261,
    )


def test_one_process_and_two_have_the_same_losses_also_when_resumed(undistributed, tmp_path):
    (tmp_path / "alone").mkdir()
    words = ("train_ddp.py", "--data", DIGITS, "--epochs")
    assert_same(epochs(launch(tmp_path / "alone", *words, 1)), undistributed, (1,))
    assert_same(epochs(launch(tmp_path, *words, 1, processes=2)), undistributed, (1,))
    assert_same(epochs(launch(tmp_path, *words, 2, processes=2)), undistributed, (2,))


def test_the_batch_script_trains_on_two_nodes(cluster, tmp_path):
    nodes = 1 if cluster.network == "none" else 2  # else node names do not resolve
    log = submit_and_wait(tmp_path, "train_ddp.py", f"--nodes={nodes}", "--gpus-per-node=2")
    assert f"rank {2 * nodes - 1} of {2 * nodes} on cpu" in log
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+),", log)]
    alone = run(tmp_path, sys.executable, SCRIPTS / "train_single.py")
    assert losses == pytest.approx([float(loss) for loss in re.findall(r"loss ([\d.]+)", alone)], abs=1e-4)
    assert len(losses) == 5 and losses[-1] < 0.2 < losses[0]


# --- the pipeline


@pytest.fixture(scope="module")
def uncut():
    """The uncut model in this process, which accumulates the gradients of the same microbatches."""
    shuffle = torch.Generator()

    def order(epoch):
        shuffle.manual_seed(epoch)
        return torch.cat(list(DataLoader(range(1536), 64, shuffle=True, generator=shuffle)))

    def layers():
        block = [nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU()]
        block += [nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32), nn.ReLU()]
        return [*block, nn.Flatten(), nn.Linear(512, 10)]

    return train_plainly(layers, torch.randperm, order, validated=256, microbatches=4)


def test_one_process_and_two_stages_have_the_losses_of_the_uncut_model_with_either_schedule(uncut, tmp_path):
    (tmp_path / "alone").mkdir()
    words = ("train_pipeline.py", "--data", DIGITS)
    assert_same(epochs(launch(tmp_path / "alone", *words, "--epochs", 1)), uncut, (1,))
    assert_same(epochs(launch(tmp_path, *words, "--cut", 3, "--epochs", 1, processes=2)), uncut, (1,))
    resumed = launch(tmp_path, *words, "--cut", 3, "--epochs", 2, "--schedule", "gpipe", processes=2)
    assert_same(epochs(resumed), uncut, (2,))


def test_the_batch_script_runs_the_pipeline_on_two_nodes(cluster, uncut, tmp_path):
    options = ("--nodes=1", "--gpus-per-node=2") if cluster.network == "none" else ("--nodes=2", "--gpus-per-node=1")
    log = submit_and_wait(tmp_path, "train_pipeline.py --data digits.npz --cut 3", *options)
    assert_same(epochs(log), uncut, (1, 2, 3, 4, 5))


def test_a_model_that_is_no_list_is_cut_and_has_the_same_loss_and_gradient(tmp_path):
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    losses = [nn.functional.cross_entropy(model(images[i : i + 4]), labels[i : i + 4]) for i in (0, 4)]
    (sum(losses) / 2).backward()
    norm = sum(parameter.grad.square().sum() for parameter in model.parameters()).sqrt()
    loss, gradient = re.search(
        r"loss ([\d.]+) gradient ([\d.]+)", launch(tmp_path, "split_any_model.py", processes=2)
    ).groups()
    assert float(loss) == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    assert float(gradient) == pytest.approx(norm.item(), rel=1e-4)  # a sum over 11 million squares


# --- the page


def test_the_page_quotes_errors_as_they_are(tmp_path):
    page = " ".join((FOLDER / "nine_steps.md").read_text().split())
    printed = run(tmp_path, sys.executable, root() / "tests" / "programs" / "step_errors.py")
    assert [text for text in ERRORS if text not in page] == []
    assert [text for text in ERRORS if text not in printed] == []
    assert len(re.findall(r"(?m)^\d\. \*\*", (FOLDER / "nine_steps.md").read_text())) == 9

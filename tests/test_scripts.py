"""The scripts to take home: plain PyTorch, the same training however they are launched, run on a real Slurm.

By day notebooks 03, 05, 07 and 09 compare them with one process, and resume them; what goes further runs at night.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from mpdemo.jobs import check as check_script
from mpdemo.jobs.slurm_job import look_up
from mpdemo.paths import root

SCRIPTS = root() / "notebooks" / "scripts"
DIGITS = root() / "mpdemo" / "data" / "digits.npz"
FIRST_LINES, LINES = 43, 129  # of the two first scripts, and of any
# Sums in float32 in another order: the losses of one process and of two were equal to 1e-6. A step left out
# (set_epoch, the average, the optimizer's state) changes them by 1e-3 and more.
TOLERANCE = 1e-4
FIRST = "EPOCHS, BATCH, WORKERS = "  # the constants of a script that tests change
ERRORS = [  # that the page quotes, and that one process can provoke; see programs/known_failures.py
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


@pytest.fixture
def copy(tmp_path):
    """A copy of the folder, in which a learner works."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "scripts"))


def run(folder, *command, fails=False) -> str:
    """Run a command in a folder as from a user's shell, for at most two minutes; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env = kept | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [*map(str, command)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode != 0) == fails, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr * fails


def launch(folder, script, *arguments, processes=1, changes=(), fails=False) -> str:
    """Run a script, in which some texts are changed, under torchrun; return what it printed."""
    text = (folder / script).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "run.py").write_text(text)
    return run(folder, "torchrun", "--standalone", f"--nproc-per-node={processes}", "run.py", *arguments, fails=fails)


def losses(printed) -> list:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def submit_and_wait(folder, command, *options) -> str:
    """Submit the batch script with a command in its last line; return its log."""
    text = (folder / "train.sbatch").read_text()
    assert len(text.splitlines()) == 21 and check_script(text, "throwaway", ask_slurm=False) == []
    text = text.replace("module load pytorch", "#").replace("train_ddp.py", command)
    (folder / "train.sbatch").write_text(text)
    job = run(folder, "sbatch", "--parsable", *options, "train.sbatch").strip()
    end = time.monotonic() + 120
    while (state := look_up(job).state) in ("pending", "running"):
        assert time.monotonic() < end, f"the job is still {state}"
        time.sleep(0.2)
    log = next(folder.glob("*.out")).read_text()
    assert state == "done", log
    return log


def test_a_script_is_short_and_needs_nothing_of_this_package_but_its_digits():
    for script in SCRIPTS.glob("*.py"):
        source = script.read_text()
        assert len(source.splitlines()) <= (FIRST_LINES if script.name.startswith("first_") else LINES), script
        assert not re.search(r"^\s*(import|from) mpdemo", source, re.M), script
    assert (SCRIPTS / "digits.npz").read_bytes() == DIGITS.read_bytes()


# --- one device and DDP


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The losses of one device."""
    found = losses(run(tmp_path_factory.mktemp("single"), sys.executable, SCRIPTS / "train_single.py"))
    assert len(found) == 5 and found[-1] < 0.2 < found[0]
    return found


@pytest.mark.nightly
def test_ddp_has_the_losses_of_one_device_also_with_workers_and_resumed_by_fewer_processes(single, copy):
    first = launch(copy, "train_ddp.py", processes=2, changes=[(FIRST + "5, 64, 0", FIRST + "2, 64, 1")])
    assert losses(first) == pytest.approx(single[:2], abs=TOLERANCE)
    assert losses(launch(copy, "train_ddp.py")) == pytest.approx(single[2:], abs=TOLERANCE)


@pytest.mark.nightly
def test_ddp_validates_with_the_batch_norm_statistics_that_it_saves(copy):
    changes = [("nn.ReLU()", "nn.BatchNorm2d(32, momentum=1.0)"), (FIRST + "5", FIRST + "1")]
    printed = launch(copy, "train_ddp.py", processes=2, changes=changes)
    norm = runpy.run_path(str(copy / "run.py"))
    model, (_, check) = norm["make_model"]().eval(), norm["make_dataset"]()
    images, labels = next(iter(DataLoader(check, 261)))
    model.load_state_dict(torch.load(copy / "train_ddp.pt")["model"])
    right = (model(images).argmax(1) == labels).sum().item()
    assert f"accuracy {right / 261:.4f}" in printed


def test_without_a_launcher_ddp_fails_loudly(copy):
    assert "environment variable RANK expected" in run(copy, sys.executable, "train_ddp.py", fails=True)


def test_the_batch_script_trains_on_two_nodes(cluster, single, copy):
    nodes = 1 if cluster.network == "none" else 2  # else node names do not resolve
    log = submit_and_wait(copy, "train_ddp.py", f"--nodes={nodes}", "--gpus-per-node=2")
    assert f"rank {2 * nodes - 1} of {2 * nodes} on cpu" in log
    assert losses(log) == pytest.approx(single, abs=TOLERANCE)


# --- FSDP


@pytest.mark.nightly
def test_fsdp_has_equal_losses_in_one_process_and_two_in_parts_and_resharded(copy):
    three, two = [(FIRST + "5", FIRST + "3")], [(FIRST + "5", FIRST + "2"), ("ACCUMULATE = 1", "ACCUMULATE = 2")]
    whole = losses(launch(copy, "train_fsdp.py", "whole", changes=three))
    assert len(whole) == 3 and whole[2] < whole[1] < whole[0]
    first = losses(launch(copy, "train_fsdp.py", processes=2, changes=two))
    assert first == pytest.approx(whole[:2], abs=TOLERANCE)
    last = losses(launch(copy, "train_fsdp.py", changes=three))
    assert last == pytest.approx(whole[2:], abs=TOLERANCE)


@pytest.mark.nightly
def test_fsdp_fills_buffers_that_no_state_dict_has_and_seeds_every_rank_and_epoch_differently(copy):
    buffer = "        self.register_buffer('angles', torch.arange(4.0), persistent=False)\n"
    seen = "        print(f'{model.angles.tolist()} {torch.initial_seed()}\\n', end='')\n"
    places = ("        self.blocks =", "        total =")
    changes = [(place, more + place) for place, more in zip(places, (buffer, seen), strict=True)]
    printed = launch(copy, "train_fsdp.py", processes=2, changes=[*changes, (FIRST + "5", FIRST + "2")])
    seeds = re.findall(r"\[0.0, 1.0, 2.0, 3.0\] (\d+)", printed)
    assert len(seeds) == len(set(seeds)) == 4


# --- the pipeline


@pytest.fixture(scope="module")
def uncut():
    """The losses of the uncut model, which accumulates the gradients of the same microbatches; two epochs."""
    script = runpy.run_path(str(SCRIPTS / "train_pipeline.py"))
    train, _ = script["make_dataset"]()
    torch.manual_seed(0)
    model, shuffle, means = script["make_layers"](), torch.Generator(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in (0, 1):
        shuffle.manual_seed(epoch)
        found = []
        for images, labels in DataLoader(train, 64, shuffle=True, generator=shuffle):
            optimizer.zero_grad()
            for x, y in zip(images.chunk(4), labels.chunk(4), strict=True):
                loss = cross_entropy(model(x), y) / 4
                loss.backward()
                found.append(loss.item())
            optimizer.step()
        means.append(sum(found) / 24)
    return means


@pytest.mark.nightly
def test_one_process_and_two_stages_have_the_losses_of_the_uncut_model_with_either_schedule(uncut, copy):
    words = ("train_pipeline.py", "--epochs")
    assert losses(launch(copy, *words, 1, "--checkpoint", "alone")) == pytest.approx(uncut[:1], abs=TOLERANCE)
    assert losses(launch(copy, *words, 1, "--cut", 3, processes=2)) == pytest.approx(uncut[:1], abs=TOLERANCE)
    resumed = launch(copy, *words, 2, "--cut", 3, "--schedule", "gpipe", processes=2)
    assert losses(resumed) == pytest.approx(uncut[1:], abs=TOLERANCE)


@pytest.mark.nightly
def test_a_pipeline_killed_between_the_renames_of_two_stages_resumes_at_the_epoch_that_both_have(uncut, copy):
    words = ("train_pipeline.py", "--epochs", 2, "--cut", 3)
    rename = "        os.replace("
    kill = "        while epoch and rank:\n            file_of(args.checkpoint, 2, 0).exists() and os._exit(1)\n"
    launch(copy, *words, processes=2, changes=[(rename, kill + rename)], fails=True)
    kept = {file.name for file in copy.glob("*.pt")}
    assert kept == {f"train_pipeline-{name}.pt" for name in ("1-stage0", "2-stage0", "1-stage1")}
    assert losses(launch(copy, *words, processes=2)) == pytest.approx(uncut[1:], abs=TOLERANCE)
    (copy / "train_pipeline-2-stage0.pt").rename(copy / "train_pipeline-4-stage0.pt")
    assert "{0, 4}, {0, 2}] epochs: move them away" in launch(copy, *words, processes=2, fails=True)


@pytest.mark.nightly
def test_a_pipeline_validates_every_image_also_of_a_set_smaller_than_a_batch(copy):
    sizes = ("[1536, 261]", "[1787, 10]")
    printed = launch(copy, "train_pipeline.py", "--epochs", 1, "--cut", 3, processes=2, changes=[sizes])
    script = runpy.run_path(str(copy / "run.py"))
    model, (_, check) = script["make_layers"](), script["make_dataset"]()
    for stage in (0, 1):
        model.load_state_dict(torch.load(copy / f"train_pipeline-1-stage{stage}.pt")["model"], strict=False)
    images, labels = next(iter(DataLoader(check, 10)))
    right = (model(images).argmax(1) == labels).sum().item()
    assert f"accuracy {right / 10:.4f}" in printed


@pytest.mark.nightly
def test_the_batch_script_runs_the_pipeline_on_two_nodes(cluster, uncut, copy):
    options = ("--nodes=1", "--gpus-per-node=2") if cluster.network == "none" else ("--nodes=2", "--gpus-per-node=1")
    log = submit_and_wait(copy, "train_pipeline.py --cut 3 --epochs 2", *options)
    assert losses(log) == pytest.approx(uncut, abs=TOLERANCE)


@pytest.mark.nightly
def test_accelerate_divides_the_batch_and_steps_a_scheduler_once_per_step(copy):
    pytest.importorskip("accelerate")
    prepare, step = "    for epoch in range(EPOCHS):\n", "            optimizer.step()\n"
    schedule = "    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1000))\n"
    steps = step + "            schedule.step()\n            count = schedule.scheduler.last_epoch\n"
    changes = [(prepare, schedule + prepare), (step, steps), ("steps, loss", "{len(images)} {count} steps, loss")]
    printed = launch(copy, "train_accelerate.py", processes=2, changes=changes)
    assert re.findall(r"24 (\d+) (\d+) steps", printed) == [("32", "24"), ("32", "48"), ("32", "72")]


# --- the page


@pytest.mark.nightly
def test_the_page_quotes_errors_as_they_are(tmp_path):
    page = " ".join((SCRIPTS / "nine_steps.md").read_text().split())
    program = root() / "tests" / "programs" / "known_failures.py"
    printed = " ".join(run(tmp_path, sys.executable, program, tmp_path).split())
    assert [text for text in ERRORS if text not in page] == []
    assert [text for text in ERRORS if text not in printed] == []
    assert len(re.findall(r"(?m)^\d\. \*\*", (SCRIPTS / "nine_steps.md").read_text())) == 9

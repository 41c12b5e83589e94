"""The scripts to take home: plain PyTorch, the same training however they are launched.

What goes further runs at night, and what clusters do to them is in test_scripts_kills.py. train_gpt.py has its own
tests, and train_fsdp.py is a part of it.
"""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from home_scripts import (
    FIRST,
    IMPORTED,
    SCRIPTS,
    Training,
    change,
    content,
    launch,
    loaded,
    log_of,
    losses,
    names_of,
    run,
    shorten,
    submit,
)
from safetensors.torch import load_file
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader
from worker_jobs import ended, signal_while_compiling

from mpdemo.paths import root

DIGITS = root() / "mpdemo" / "data" / "digits.npz"
LINES = {
    "first_ddp.py": 50,
    "first_single.py": 36,
    "train_single.py": 250,
    "train_ddp.py": 330,
    "train_ddp_small.py": 95,
    "job.py": 395,
}
LINES |= {"train_fsdp.py": 260, "train_gpt.py": 480}
OTHERS, ALL_LINES = 200, 2641  # of any other one, of all
# Sums in float32 in another order: the losses of one process and of two were equal to 1e-6. A step left out
# (the order of an epoch, the average, the optimizer's state) changes them by 1e-3 and more.
TOLERANCE = 1e-4


@pytest.fixture
def copy(tmp_path):
    """A copy of the folder, in which a learner works."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "scripts"))


def test_a_script_is_short_and_needs_nothing_of_this_package_but_its_digits():
    sources = {script.name: script.read_text() for script in SCRIPTS.glob("*.py")}
    lines = {name: source.splitlines() for name, source in sources.items()}
    for name, source in sources.items():
        assert len(lines[name]) <= LINES.get(name, OTHERS), name
        assert not re.search(r"^\s*(import|from) mpdemo", source, re.M), name
        assert name.startswith(("first_", "gpt", "job")) or 'if __name__ == "__main__":' in source, name
    assert sum(map(len, lines.values())) <= ALL_LINES
    assert (SCRIPTS / "digits.npz").read_bytes() == DIGITS.read_bytes()


def test_the_text_says_where_it_is_from_and_every_byte_after_that_is_predicted_once():
    head, _, play = (SCRIPTS / "text.txt").read_text().partition("\n\n")
    assert "public domain" in head and 100_000 < len(play) < 300_000
    gpt = names_of(SCRIPTS / "gpt.py")
    sets = [dataset.tensors for dataset in gpt["make_datasets"]()]
    targets = torch.cat([targets[targets != gpt["PADDING"]] for _, targets in sets]).tolist()
    speeches = bytes(targets).split(bytes([gpt["END"]]))
    assert b"\n\n".join(speeches).decode().strip() == play.strip()
    assert all((inputs[0, 1:9] == targets[0, :8]).all() for inputs, targets in sets)


@pytest.mark.parametrize("end", ["\r\n", "utf-16", None])
def test_a_text_that_is_not_as_expected_is_named_in_one_line(copy, monkeypatch, end):
    monkeypatch.delenv("RANK", raising=False)
    text, file = (copy / "text.txt").read_text(), copy / "text.txt"
    file.write_bytes(
        (text.replace("\n", end) if end == "\r\n" else text).encode(
            "utf-16" if end == "utf-16" else "utf-8"
        )
    )
    if not end:
        file.unlink()
    with pytest.raises(
        SystemExit, match=rf"^{file}(: only 0 samples; .*| cannot be read \(No such file or directory\))$"
    ):
        names_of(copy / "gpt.py")["make_datasets"]()


# --- one device and DDP


@pytest.mark.parametrize("script", [
    "first_ddp.py",
    *(pytest.param(f"train_{name}.py", marks=pytest.mark.nightly) for name in ("ddp_small", "ddp", "accelerate")),
])  # fmt: skip
def test_each_process_draws_its_own_random_numbers(copy, script):
    """In dropout, for instance."""
    step, draw = (
        "optimizer.step()",
        "__import__('os').write(1, f'drew {torch.rand(1).item()}\\n'.encode())",
    )  # a line whole
    printed = launch(copy, script, processes=2, changes=[(step, f"{step}; {draw}")])
    drawn = re.findall(r"drew (\S+)", printed)
    assert len(drawn) >= 2 * 3 * 24 and len({*drawn}) == len(drawn)


SMALL = "train_ddp_small.py"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The short script with dropout, run by two processes without an end before its own: what it says and saves."""
    folder = Path(shutil.copytree(SCRIPTS, tmp_path_factory.mktemp("small") / "scripts"))
    printed = launch(folder, SMALL, processes=2, changes=[("nn.Flatten()", "nn.Flatten(), nn.Dropout()")])
    return losses(printed), content(folder / "train_ddp_small.pt")


def test_the_short_script_has_the_losses_of_one_process_and_those_of_the_first_one(copy):
    one, two = (losses(launch(copy, SMALL, f"{n}.pt", processes=n)) for n in (1, 2))
    assert len(one) == 5 and one == pytest.approx(two, abs=TOLERANCE)
    first = re.findall(r"loss ([\d.]+)", launch(copy, "first_ddp.py", processes=2))
    assert [*map(float, first)] == pytest.approx(two[:3], abs=TOLERANCE)


@pytest.mark.parametrize(
    "place", ["part.replace(FILE)", "optimizer.step()"], ids=["while it saves", "in a step"]
)
def test_the_short_script_killed_and_resumed_ends_as_if_it_had_not_been(copy, uninterrupted, place):
    """Killed in the third epoch; half a file may lie beside the whole one."""
    dropout = ("nn.Flatten()", "nn.Flatten(), nn.Dropout()")
    third = "state['epochs'] == 3" if "FILE" in place else "epoch == 2 and rank == 1"
    cut = "part.write_bytes(b'half') and " * ("FILE" in place)
    kill = (place, f"{third} and {cut}os.kill(os.getpid(), 9); {place}")
    killed = losses(launch(copy, SMALL, processes=2, changes=[dropout, kill], fails=True))
    resumed = losses(launch(copy, SMALL, processes=2, changes=[dropout]))
    assert killed[:2] + resumed == uninterrupted[0] and len(resumed) == 3
    assert content(copy / "train_ddp_small.pt") == uninterrupted[1]
    assert losses(launch(copy, SMALL, processes=2, changes=[dropout])) == []


@pytest.mark.nightly
def test_ddp_validates_with_the_batch_norm_statistics_that_it_saves(copy):
    changes = [("nn.ReLU()", "nn.BatchNorm2d(32, momentum=1.0)"), (FIRST + "5", FIRST + "1")]
    printed = launch(copy, "train_ddp.py", processes=2, changes=changes)
    norm = runpy.run_path(str(copy / "run.py"))
    model, (_, check) = norm["make_model"]().eval(), norm["make_dataset"]()
    images, labels = next(iter(DataLoader(check, 261)))
    model.load_state_dict(torch.load(copy / "train_ddp-24.pt")["model"])
    right = (model(images).argmax(1) == labels).sum().item()
    assert f"accuracy {right / 261:.4f}" in printed


@pytest.mark.parametrize(("script", "said"), [
    ("train_single.py", "srun started several processes, and each would train alone: use train_ddp.py"),
    ("train_ddp.py", "RANK is not set: start this script with torchrun"),
    ("train_ddp_small.py", "RANK is not set: start this script with torchrun"),
    ("train_fsdp.py", "RANK is not set: start this script with torchrun"),
])  # fmt: skip
def test_a_bare_srun_of_several_processes_is_refused(copy, monkeypatch, script, said):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=said):
        names_of(copy / script, run_name="__main__")


# --- its checkpoints, alone in a process group

BATCHES = {"size": 64, "of an epoch": 24}


class Alone:
    """A script with checkpoints of a name; what its functions do where one process is all there is."""

    def __init__(self, script, name):
        self.names = names_of(script, name)
        self.model = torch.nn.Linear(2, 2)
        self.state = {"steps": 0, "loss": 0.0, "batches": BATCHES}

    def call(self, name, *arguments):
        """Return what a function of it returns, or the line with which it ends the job."""
        try:
            return self.names[name](*arguments)
        except SystemExit as end:
            return str(end)

    def resume(self, model=None):
        """Return the state with which it begins, or the line with which it ends."""
        model = model or self.model
        return self.call(
            "resume", self.state, model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        )

    def save(self, steps):
        """Return what is wrong after a save, if anything."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        more = {"steps": steps, "model": self.model.state_dict(), "optimizer": optimizer.state_dict()}
        return self.call("save", self.state | more)


@pytest.fixture(params=["train_single.py", "train_ddp.py"])
def begin(request, process_group, tmp_path, monkeypatch):
    """In an empty folder: a function that makes a script `Alone` with checkpoints of a name."""
    monkeypatch.chdir(tmp_path)
    return partial(Alone, SCRIPTS / request.param)


@pytest.mark.parametrize(("name", "said"), [
    *((name, f"checkpoints cannot be named {name!r}: say how ") for name in ("", ".", "..", "a/", "a/.", "a/..", "-h")),
    *((name, f"no checkpoint {name}-*.pt can be written (") for name in ("file/a", "loop/a", 250 * "a", "/sys/a")),
])  # fmt: skip
def test_a_folder_in_which_no_checkpoint_can_be_is_refused_before_the_first_step(
    begin, tmp_path, name, said
):
    Path("file").touch()
    Path("loop").symlink_to("loop")
    line = begin(name).resume()
    assert str(line).startswith(said) and "\n" not in line
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


@pytest.mark.parametrize("name", ["a", "run[lr=0.1]", "deep/er/.a*"])
def test_only_whole_checkpoints_of_this_name_and_this_model_are_resumed(begin, caplog, name):
    """Beside them lie a folder, a pipe, and a file of somebody else's, each with the name of a newer one."""
    caplog.set_level("INFO")
    alone = begin(name)
    assert alone.resume()["steps"] == 0
    assert [alone.save(steps) for steps in (9, 60, 120)] == [None] * 3
    os.mkfifo(f"{name}-999.pt")
    Path(f"{name}-998.pt").mkdir()
    torch.save({"batches": BATCHES, "weights": 1}, f"{name}-997.pt")
    torch.save({}, "-998.pt")
    assert "does not fit this model (RuntimeError: Error(s) in" in (
        said := alone.resume(torch.nn.Linear(3, 2))
    )
    assert "size mismatch" in said and "\n" not in said
    assert Path(f"{name}-997.pt").exists() and alone.resume()["steps"] == 120
    assert f"resumes from {name}-120.pt, after 120 steps" in caplog.text
    assert f"{name}-997.pt is damaged (AssertionError: without {{" in caplog.text
    kept = {path.name for path in Path(name).parent.glob("*-*")}
    endings = {path.rpartition("-")[2] for path in kept}
    assert endings == {"60.pt", "120.pt", "997.damaged", "998.pt", "999.pt"}


def test_a_save_into_a_folder_that_is_gone_ends_in_one_line(begin):
    alone = begin("folder/a")
    alone.resume()
    Path("folder").rmdir()
    Path("folder").touch()
    said = alone.save(60)
    assert said.startswith("folder/a-60.pt could not be written (NotADirectoryError: ") and "\n" not in said


@pytest.mark.parametrize(("script", "least"), [
    *((script, "2.9") for script in ("train_single", "train_ddp")),
    *((script, "2.10") for script in ("train_gpt", "train_fsdp", "finetune_lora", "experts", "export", "rehearse")),
])  # fmt: skip
def test_a_script_says_in_one_line_that_pytorch_is_too_old(monkeypatch, script, least):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0+cu128"))
    with pytest.raises(
        SystemExit, match=rf"^this script needs PyTorch {least} or newer, and this is 2\.8\.0\+cu128$"
    ):
        names_of(file := SCRIPTS / f"{script}.py")
    assert f"It needs PyTorch {least} or newer." in " ".join(file.read_text().split('"""')[1].split())


@pytest.mark.parametrize(("version", "late", "said"), [
    ("2.11.0", 29, "torchrun kills after 30 s"),
    ("2.11.0", 31, "torchrun kills after 30 s: lower LOOK, or take PyTorch 2.12"),
    ("2.12.0", 31, "torchrun kills after 150 s"),
    ("2.12.0", 151, "torchrun kills after 150 s: lower LOOK, or raise TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    ("2.12.0 GRACE", 31, "torchrun kills after 150 s, Slurm, if it preempts, after 50 s"),
    ("2.12.0 GRACE", 51, "torchrun kills after 150 s, Slurm, if it preempts, after 50 s: lower LOOK"),
])  # fmt: skip
def test_the_log_says_how_long_torchrun_and_slurm_really_wait(monkeypatch, version, late, said):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version.split()[0]))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "150")
    monkeypatch.setenv("GRACE", "50" if "GRACE" in version else "")
    assert [names_of(SCRIPTS / f"{script}.py")["limits"](late) for script in ("train_ddp", "job")] == [
        said,
        said,
    ]


class Decides(torch.nn.Module):
    """A model that looks at the values of an image."""

    def forward(self, images):
        return images if images.sum().item() > 0 else -images


@pytest.mark.parametrize(("layers", "operations"), [
    # there and back: sums of 9 products for 2 x 36 numbers
    ((torch.nn.Conv2d, 1, 2, 3), 3 * 2 * 2 * 9 * 36),
    ((Decides,), 0),
])  # fmt: skip
def test_operations_are_counted_without_a_second_model_in_memory(
    begin, caplog, monkeypatch, layers, operations
):
    alone, made = begin("a"), []

    def make():
        made.append(torch.nn.Sequential(layers[0](*layers[1:]), torch.nn.BatchNorm2d(2)))
        return made[0]

    monkeypatch.setitem(alone.names["count"].__globals__, "make_model", make)
    caplog.set_level("INFO")
    assert alone.call("count", [(torch.ones(1, 8, 8), 0)]) == operations
    assert {parameter.device.type for parameter in made[0].parameters()} == {"meta"}
    assert caplog.text.count("no MFU, as the operations of this model cannot be counted (") == (
        operations == 0
    )


# --- the batch script

PROGRAMS = {  # of a cluster, as far as train.sbatch asks them
    "module": "",
    "ss": "",
    "python": 'echo "$TORCH"',
    "scontrol": 'case "$*" in "show config") echo "KillWait                = 30 sec";;'
    ' "show partition p") echo "   GraceTime=20 Hidden=NO";; requeue*) echo "$@";; esac',
    "srun": 'echo "torchrun has ${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-30} s, a preempted job $GRACE s"\n'
    "trap : USR1; kill -USR1 $PPID; sleep 0.5; touch train_ddp-7.pt",
}


@pytest.mark.parametrize(("version", "printed"), [
    ("2.9.1", ["PyTorch 2.9.1: --signals-to-handle, below, is new in 2.10"]),
    ("2.11.0", ["torchrun has 30 s, a preempted job 50 s", "requeue 7"]),
    ("2.12.0+cu130", ["torchrun has 150 s, a preempted job 50 s", "requeue 7"]),
])  # fmt: skip
def test_the_batch_script_asks_versions_and_limits_and_counts_only_checkpoints_of_its_name(
    tmp_path, version, printed
):
    """Those of other runs have higher numbers."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n".replace("\\n", "\n"))
        (tmp_path / name).chmod(0o755)
    for other in ("train_ddp-x-99.pt", "train_ddp-1-99.pt", "train_ddp-99.damaged"):
        (tmp_path / other).touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH": version}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_PARTITION": "p"}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["bash", SCRIPTS / "train.sbatch"], **how)
    assert (done.stdout.splitlines(), done.returncode) == (printed, int(version == "2.9.1")), done.stderr


def submit_and_wait(folder, command, *options) -> str:
    """Submit the batch script with a command in its last lines; return its log."""
    assert ended(submit(folder, command, *options)) == "done", log_of(folder)
    return log_of(folder)


def test_the_batch_script_trains_on_two_nodes_as_one_device_does(cluster, copy):
    single = losses(run(copy, sys.executable, "train_single.py"))
    assert len(single) == 5 and single[-1] < 0.2 < single[0]
    nodes = 1 if cluster.network == "none" else 2  # else node names do not resolve
    log = submit_and_wait(copy, "train_ddp.py", f"--nodes={nodes}", "--gpus-per-node=1")
    assert f"rank {nodes - 1} of {nodes} on cpu" in log
    assert losses(log) == pytest.approx(single, abs=TOLERANCE)


# --- ResNet-50 on ImageNet


def test_a_resnet_trains_on_folders_of_images_and_resumes(copy, jpegs):
    """Two epochs of five steps, small images; batch norm and random crops. It resumes after eight steps."""
    small = [(" = 90, 256, 8", " = 2, 8, 1"), ("25_000, 5_000", "2, 2"), ("SIZE = 224", "SIZE = 32")]
    small += [("resnet50", "resnet18")]
    whole = launch(copy, "train_imagenet.py", "whole", "--data", jpegs, processes=2, changes=small)
    state = loaded(copy / "whole-10.pt")["model"]
    (copy / "whole-10.pt").unlink()
    resumed = launch(copy, "train_imagenet.py", "whole", "--data", jpegs, processes=2, changes=small)
    assert len(losses(whole)) == 2 and losses(resumed) == pytest.approx(losses(whole)[1:], abs=TOLERANCE)
    again = loaded(copy / "whole-10.pt")["model"]
    assert again["fc.weight"].shape == (10, 512)
    torch.testing.assert_close(again, state)


@pytest.mark.parametrize(("classes", "said"), [
    ({"train": "ab", "val": "ac"}, "train/ and val/ have different classes"),
    ({"train": "ab"}, "is not laid out like ImageNet (FileNotFoundError: "),
])  # fmt: skip
def test_folders_that_are_no_imagenet_are_one_line(copy, jpegs, tmp_path, classes, said):
    image = next((jpegs / "train").rglob("*.jpg"))
    for part, names in classes.items():
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            shutil.copy(image, tmp_path / part / name)
    printed = launch(copy, "train_imagenet.py", "a", "--data", tmp_path, fails=True)
    assert printed.count(said) >= 1 and "Traceback" not in printed.partition(said)[0], printed


# --- job.py: what a model begins with, and its checkpoints


@pytest.fixture
def job(process_group):
    """What job.py defines, in a group of one process."""
    return names_of(SCRIPTS / "job.py")


class Half(torch.nn.Linear):
    """Two layers' worth of memory, of which reset_parameters fills some."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.register_buffer("mask", torch.ones(2, 2) > 0)
        self.register_buffer("numbers", torch.arange(4), persistent=False)
        self.own = torch.nn.Parameter(torch.ones(2))

    def reset_parameters(self):
        super().reset_parameters()
        if "mask" in dict(self.named_buffers()):
            self.mask[0].fill_(True)


@pytest.mark.parametrize(("layer", "names"), [
    (lambda: torch.nn.Linear(3, 3), {"weight", "bias"}),
    (lambda: torch.nn.BatchNorm1d(3), {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}),
    (Half, {"weight"}),
    (lambda: torch.nn.MultiheadAttention(4, 2), set()),
])  # fmt: skip
def test_a_layer_begins_with_what_its_reset_parameters_fills_and_draws_it_once(job, layer, names):
    torch.manual_seed(0)
    right, following = layer(), torch.rand(1)
    with torch.device("meta"):
        empty = layer()
    torch.manual_seed(0)
    with torch.no_grad():
        begun = job["begun"](empty, torch.device("cpu"))
    assert begun.keys() == names
    assert all(
        value.equal(right.get_parameter(k) if k in dict(right.named_parameters()) else right.get_buffer(k))
        for k, value in begun.items()
    )
    assert not names or following == torch.rand(1)


@pytest.mark.parametrize("name", ["run", "run[lr=0.1]", "*", "a?", ".hidden", "a-1"])
def test_checkpoints_are_found_by_their_name_whatever_is_in_it(tmp_path, job, name):
    for number in ("60", "120", "7.damaged", "x"):
        (tmp_path / f"{name}-{number}").mkdir()
        (tmp_path / f"{name}-{number}" / ".metadata").touch()
    (tmp_path / "other-180").mkdir()
    (tmp_path / "other-180" / ".metadata").touch()
    (tmp_path / f"{name}-240" / ".metadata").mkdir(parents=True)
    assert [path.name for path in job["saved"](tmp_path / name)] == [f"{name}-120", f"{name}-60"]


def a_file(folder):
    (folder / "there").touch()
    return folder / "there" / "run"


def a_loop(folder):
    (folder / "there").symlink_to(folder / "there")
    return folder / "there" / "run"


def a_folder_of_yours(folder):
    """Of the results of an experiment, which is no checkpoint, whole or begun."""
    (folder / "run-2").mkdir()
    (folder / "run-2" / "results.csv").touch()
    return folder / "run"


def a_file_of_this_name(folder):
    (folder / "run-60").touch()
    return folder / "run"


@pytest.mark.parametrize(
    "case", [a_file, a_loop, a_file_of_this_name, a_folder_of_yours, lambda folder: Path("/sys/run")]
)
def test_where_nothing_can_be_saved_the_run_ends_before_it_begins(tmp_path, job, case):
    with pytest.raises(SystemExit, match=r"^no checkpoint \S+/run-\* can be written \(.*\)$"):
        job["Run"](case(tmp_path), {}, 1, 1)
    job["Run"](tmp_path / "new" / "run", {}, 1, 1)
    assert not list((tmp_path / "new").iterdir())


def test_what_fails_after_a_save_raises_nothing(tmp_path, job):
    run = job["Run"](tmp_path / "run", {}, 1, 1)
    run.writing, run.done = SimpleNamespace(result=lambda: None), 4
    a_folder_of_yours(tmp_path)
    (tmp_path / "run-1").touch()
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run-3" / "__0_0.distcp").touch()  # begun, and never finished
    run.finish()
    failed = torch.distributed.checkpoint.CheckpointException("", {0: (ValueError(), None)})
    assert {path.name for path in tmp_path.rglob("*")} == {"run-1", "run-2", "results.csv"}
    assert job["reason"](failed) == "ValueError"


def test_killed_in_a_second_save_of_one_step_it_resumes_from_the_first(tmp_path):
    """Its name is a pattern, too."""
    training, name = Training.anew("train_fsdp", tmp_path / "scripts"), "run[lr=0.1]"
    save = "            run.save(model, optimizer)\n"
    die = f"            {IMPORTED}.befall('die_in_the_middle_of_a_file', run.done == 4, 0)\n"
    training.run(name, (save, f"{save}            run.finish()\n{die}{save}"), processes=1, fails=True)
    printed = training.run(name, processes=1)
    assert min(map(int, re.findall(r"step (\d+):", printed))) == 5 and "damaged" not in printed


# --- FSDP, tensor parallelism and LoRA, of a GPT


@pytest.fixture
def small(copy):
    """The copy with a text of ten batches, two epochs of five steps."""
    shorten(copy)
    return copy


def distance(a, b) -> float:
    """Return the largest difference of the weights of two checkpoints, which have the same names."""
    a, b = loaded(a)["model"], loaded(b)["model"]
    assert a.keys() == b.keys()
    return max((value - b[name]).abs().max().item() for name, value in a.items())


@pytest.mark.nightly
def test_tensor_parallelism_in_two_groups_equals_one_process(small):
    change(small / "job.py", [("{speed:,.0f} {self.unit}/s", "{self.items / self.copies:.0f} {self.unit}")])
    whole = launch(small, "train_fsdp.py")
    printed = launch(small, "train_gpt.py", "--tp", 2, processes=4, seconds=300)
    assert losses(printed) == pytest.approx(losses(whole), abs=TOLERANCE)
    tokens = [re.findall(r"(\d+) tokens", text) for text in (whole, printed)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2  # both ranks of a group have the same ones
    assert distance(small / "train_gpt-10", small / "train_fsdp-10") < 1e-3


@pytest.mark.nightly
def test_the_batch_script_runs_two_stages_on_two_nodes(cluster, small):
    options = (
        ("--nodes=1", "--gpus-per-node=2")
        if cluster.network == "none"
        else ("--nodes=2", "--gpus-per-node=1")
    )
    log = submit_and_wait(small, 'train_gpt.py --pp 2 --checkpoint "$CHECKPOINT"', *options)
    assert losses(log) == pytest.approx(losses(launch(small, "train_fsdp.py")), abs=TOLERANCE)


@pytest.mark.nightly
def test_the_gradients_of_lora_adapters_are_averaged_and_only_adapters_are_saved(small):
    assert "no model train_fsdp-NUMBER: train it" in launch(small, "finetune_lora.py", fails=True)
    launch(small, "train_fsdp.py", processes=2)
    words = "finetune_lora.py", "--checkpoint"
    one = losses(launch(small, *words, "one"))
    two = losses(launch(small, *words, "two", processes=2))
    compiled = losses(launch(small, *words, "compiled", "--compile", processes=2, seconds=300))
    assert one[1] < one[0] - 0.05
    assert two == pytest.approx(one, abs=TOLERANCE) and compiled == pytest.approx(one, abs=TOLERANCE)
    assert distance(small / "two-10", small / "one-10") < 1e-3
    assert {name.split(".")[-1] for name in loaded(small / "two-10")["model"]} == {"a", "b"}


@pytest.mark.nightly
def test_a_signal_during_a_compilation_does_not_reach_the_compiler(small, tmp_path):
    """torchrun and Slurm signal all processes; a training whose compiler has died would wait for it."""
    change(small / "job.py", [("LOOK = 10", "LOOK = 1")])
    words = (signal.SIGTERM, small, tmp_path / "compiled", "train_fsdp.py", "--compile")
    status, printed = signal_while_compiling(*words)
    assert status == 0 and list(small.glob("train_fsdp-[12]/.metadata")), printed


# --- a checkpoint for one device


@pytest.mark.parametrize(("script", "flags"), [
    ("train_fsdp.py", "--shard 2"),
    *(pytest.param(*words, marks=pytest.mark.nightly) for words in (
        ("train_gpt.py", "--pp 2 --schedule zbv"), ("train_gpt.py", "--tp 2"))),
])  # fmt: skip
def test_an_exported_checkpoint_has_on_one_device_the_loss_that_was_printed(small, script, flags):
    printed = launch(small, script, *flags.split(), "--epochs", 1, "--checkpoint", "saved", processes=2)
    folder = max(small.glob("saved-*"), key=lambda path: int(path.name[6:]))
    assert "27 tensors" in run(small, sys.executable, "export.py", folder)
    gpt = names_of(small / "gpt.py")
    model = gpt["GPT"]()
    model.load_state_dict(load_file(f"{folder}.safetensors"))
    inputs, targets = gpt["make_datasets"]()[1].tensors
    with torch.no_grad():
        loss = model(inputs, targets).item() / gpt["count"](targets)
    assert loss == pytest.approx(float(re.findall(r"validation ([\d.]+)", printed)[-1]), abs=1e-5)


def test_weights_of_any_type_are_exported_and_no_model_is_refused(copy, monkeypatch):
    weights = {
        str(kind): torch.ones(3).to(kind)
        for kind in (torch.float64, torch.float16, torch.int32, torch.bool)
    }
    monkeypatch.chdir(copy)
    script = names_of(copy / "export.py")
    for name, state in (
        ("a-1", {"model": weights}),
        ("b-1", {"weights": weights}),
        ("c-1", {"model": {"x": "text"}}),
    ):
        torch.distributed.checkpoint.save(state, checkpoint_id=name, no_dist=True)
    monkeypatch.setattr(script["dcp"], "load", partial(script["dcp"].load, no_dist=True))
    script["export"](Path("a-1"), Path("a-1.safetensors"))
    found = load_file("a-1.safetensors")
    assert found.keys() == weights.keys() and all(
        found[name].equal(value) for name, value in weights.items()
    )
    for name, said in (
        ("b-1", "b-1 has no model, only weights"),
        ("c-1", "c-1: model.x is no tensor of a type"),
    ):
        with pytest.raises(SystemExit, match=f"^{said}"):
            script["export"](Path(name), Path(f"{name}.safetensors"))
    assert [path.name for path in copy.glob("*safetensors*")] == ["a-1.safetensors"]


@pytest.mark.parametrize(("arguments", "said"), [
    (("run-5",), "no complete checkpoint run-5; there is run-4"),
    (("run-4",), "run-4 is damaged ("),
    ((), "python export.py CHECKPOINT [FILE]"),
])  # fmt: skip
def test_what_cannot_be_exported_is_refused_in_one_line(copy, monkeypatch, arguments, said):
    for name in ("run-4/.metadata", "run-5/__0_0.distcp"):
        (copy / name).parent.mkdir()
        (copy / name).write_text("")
    monkeypatch.chdir(copy)
    script = names_of(copy / "export.py")
    monkeypatch.setattr(sys, "argv", ["export.py", *arguments])
    try:
        with pytest.raises(SystemExit) as end:
            script["main"]()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert str(end.value).startswith(said) and "\n" not in str(end.value)
    assert not list(copy.glob("*safetensors*"))


# --- a library


@pytest.mark.nightly
def test_accelerate_divides_the_batch_and_steps_a_scheduler_once_per_step(copy):
    pytest.importorskip("accelerate")
    prepare, step = "    for epoch in range(EPOCHS):\n", "            optimizer.step()\n"
    schedule = (
        "    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1000))\n"
    )
    steps = step + "            schedule.step()\n            count = schedule.scheduler.last_epoch\n"
    changes = [
        (prepare, schedule + prepare),
        (step, steps),
        ("steps, loss", "{len(images)} {count} steps, loss"),
    ]
    printed = launch(copy, "train_accelerate.py", processes=2, changes=changes)
    assert re.findall(r"24 (\d+) (\d+) steps", printed) == [("32", "24"), ("32", "48"), ("32", "72")]

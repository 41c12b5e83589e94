"""The scripts to take home: plain PyTorch, the same training however they are launched, run on a real Slurm.

By day notebooks 03, 05, 07, 08 and 10 compare them with one process, and resume them; what goes further runs at night.
"""

import difflib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from worker_jobs import signal_while_compiling, until

from mpdemo.jobs import check as check_script
from mpdemo.jobs.slurm_job import look_up
from mpdemo.paths import root

SCRIPTS = root() / "notebooks" / "scripts"
DIGITS = root() / "mpdemo" / "data" / "digits.npz"
FIRST_LINES, LINES, ALL_LINES = 45, 136, 2250  # of the two first scripts, of any, of all
LONG = {"train_gpt.py": 450, "job.py": 290, "train_ddp.py": 263, "train_single.py": 197, "experts.py": 176}
SLURM = 120  # s in which a job comes so far
DIFFERENCE = 40  # lines by which a script derived from train_fsdp.py may differ from it
# Sums in float32 in another order: the losses of one process and of two were equal to 1e-6. A step left out
# (set_epoch, the average, the optimizer's state) changes them by 1e-3 and more.
TOLERANCE = 1e-4
FIRST = "EPOCHS, BATCH, WORKERS = "  # the constants of a script that tests change


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


def names_of(script, run_name="script") -> dict:
    """Return what a script defines; it imports from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)
        patch.setattr(sys, "argv", [str(script)])
        for module in ("gpt", "job", "train_ddp"):
            patch.setitem(sys.modules, module, None)  # afterwards all are what they were
            del sys.modules[module]
        return runpy.run_path(str(script), run_name=run_name)


def losses(printed) -> list:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def submit(folder, command, *options) -> str:
    """Submit the batch script with a command in its last line; return the job's number."""
    text = (folder / "train.sbatch").read_text()
    assert len(text.splitlines()) <= 30 and check_script(text, "throwaway", ask_slurm=False) == []
    text = text.replace("module load pytorch", "#").replace("train_ddp.py", command)
    (folder / "train.sbatch").write_text(text)
    return run(folder, "sbatch", "--parsable", *options, "train.sbatch").strip()


def log_of(folder) -> str:
    return "".join(path.read_text() for path in folder.glob("*.out"))


def submit_and_wait(folder, command, *options) -> str:
    """Submit the batch script with a command in its last line; return its log."""
    job = submit(folder, command, *options)
    until(lambda: look_up(job).state not in ("pending", "running"), SLURM)
    assert look_up(job).state == "done", log_of(folder)
    return log_of(folder)


def test_a_script_is_short_and_needs_nothing_of_this_package_but_its_digits():
    sources = {script.name: script.read_text() for script in SCRIPTS.glob("*.py")}
    lines = {name: source.splitlines() for name, source in sources.items()}
    for name, source in sources.items():
        assert len(lines[name]) <= LONG.get(name, FIRST_LINES if name.startswith("first_") else LINES), name
        assert not re.search(r"^\s*(import|from) mpdemo", source, re.M), name
        assert name.startswith(("first_", "gpt", "job")) or 'if __name__ == "__main__":' in source, name
    assert sum(map(len, lines.values())) <= ALL_LINES
    for name in ("train_fsdp_tp.py", "finetune_lora.py"):
        changed = [line for line in difflib.ndiff(lines["train_fsdp.py"], lines[name]) if line[0] in "+-"]
        assert len(changed) <= DIFFERENCE, (name, len(changed))
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


@pytest.mark.parametrize(("script", "said"), [
    ("train_single.py", "srun started several processes, and each would train alone: use train_ddp.py"),
    ("train_ddp.py", "RANK is not set: start this script with torchrun"),
    ("train_fsdp.py", "RANK is not set: start this script with torchrun"),
])  # fmt: skip
def test_a_bare_srun_of_several_processes_is_refused(copy, monkeypatch, script, said):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=said):
        names_of(copy / script, run_name="__main__")


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "processes"), [("train_single", 1), ("train_ddp", 2)])
def test_a_signal_to_one_rank_stops_all_and_the_same_command_resumes_bit_for_bit(copy, script, processes):
    """It comes in the second epoch, to the loader's worker as well; kill -USR2 has shown the stack before."""
    ends = {"whole": launch(copy, f"{script}.py", "whole.pt", processes=processes)}
    step = "            loss.backward()"
    all_of_it = "*(p.pid for p in __import__('multiprocessing').active_children())"  # signalled by another process
    kill = f"[faulthandler.dump_traceback(), os.system(' '.join(map(str, ('kill -TERM', os.getpid(), {all_of_it}))))]"
    send = f"            {kill} if {{}} else None\n"
    chosen = "state['steps'] == 24 and done == 5" + " and rank == 1" * (processes > 1)
    change = [(step, send.format(chosen) + step), ("WORKERS = 5, 64, 0", "WORKERS = 5, 64, 1")]
    stopped = launch(copy, f"{script}.py", "model.pt", processes=processes, changes=change)
    resumed = launch(copy, f"{script}.py", "model.pt", processes=processes)
    assert len(losses(stopped)) == 1 and losses(stopped) + losses(resumed) == losses(ends["whole"])
    whole, again = (torch.load(copy / f"{name}.pt") for name in ("whole", "model"))
    assert whole["steps"] == again["steps"] == 120
    assert all(torch.equal(value, again["model"][name]) for name, value in whole["model"].items())


def test_the_batch_script_trains_on_two_nodes(cluster, single, copy):
    nodes = 1 if cluster.network == "none" else 2  # else node names do not resolve
    log = submit_and_wait(copy, "train_ddp.py", f"--nodes={nodes}", "--gpus-per-node=1")
    assert f"rank {nodes - 1} of {nodes} on cpu" in log
    assert losses(log) == pytest.approx(single, abs=TOLERANCE)


@pytest.mark.nightly
def test_the_batch_script_warns_the_training_and_starts_again_after_it_has_saved(cluster, single, copy):
    nodes = 1 if cluster.network == "none" else 2
    text = (copy / "train_ddp.py").read_text()
    (copy / "slow.py").write_text(
        text.replace("            optimizer.step()\n", "            optimizer.step()\n            time.sleep(0.2)\n")
    )
    job = submit(copy, "slow.py", f"--nodes={nodes}", "--gpus-per-node=2")
    until(lambda: "epoch 1: loss" in log_of(copy), SLURM)
    run(copy, "scancel", "--batch", "--signal=USR1", job)
    until(lambda: look_up(job).state == "pending", SLURM)
    (copy / "slow.py").write_text(text)
    time.sleep(2)  # a node refuses a job that starts again within the second of its end
    run(copy, "scontrol", "update", f"jobid={job}", "StartTime=now")
    until(lambda: look_up(job).state not in ("pending", "running"), SLURM)
    assert look_up(job).state == "done", log_of(copy)
    assert f"rank {2 * nodes - 1} of {2 * nodes} on cpu" in log_of(copy)
    assert losses(log_of(copy)) == pytest.approx(single, abs=TOLERANCE)


# --- FSDP, tensor parallelism and LoRA, of a GPT


@pytest.fixture
def small(copy):
    """The copy with a text of ten batches, two epochs of five steps."""
    text = (copy / "gpt.py").read_text()
    assert ":-256" in text and "-256:" in text
    (copy / "gpt.py").write_text(text.replace(":-256", ":160").replace("-256:", "-64:"))
    return copy


SHORT = (FIRST + "2", FIRST + "2")


def checkpoint(folder) -> dict:
    """Return a sharded checkpoint as one process would have saved it."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


def distance(a, b) -> float:
    """Return the largest difference of the weights of two checkpoints, which have the same names."""
    a, b = checkpoint(a)["model"], checkpoint(b)["model"]
    assert a.keys() == b.keys()
    return max((value - b[name]).abs().max().item() for name, value in a.items())


@pytest.mark.nightly
def test_fsdp_equals_one_process_stops_by_a_signal_and_resumes_bit_for_bit_or_resharded(small):
    """The signal comes to one rank, in the middle of the second epoch; the ranks' parts have unequal tokens."""
    whole = losses(launch(small, "train_fsdp.py", "whole", changes=[SHORT]))
    two = [SHORT, ("ACCUMULATE = 1", "ACCUMULATE = 2")]
    assert losses(launch(small, "train_fsdp.py", "two", processes=2, changes=two)) == pytest.approx(
        whole, abs=TOLERANCE
    )
    assert len(whole) == 2 and whole[1] < whole[0] - 0.2 and distance(small / "two-10", small / "whole-10") < 1e-3
    step = "            optimizer.step()\n"
    send = (
        "            import os, signal\n            done == 6 and rank == 1 and os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    launch(small, "train_fsdp.py", "stopped", processes=2, changes=[*two, (step, send + step)])
    assert {path.name for path in small.glob("stopped-*")} == {"stopped-5", "stopped-8"}
    shutil.copytree(small / "stopped-8", small / "fewer-8")
    again = launch(small, "train_fsdp.py", "stopped", processes=2, changes=two)
    assert (
        losses(again) == pytest.approx(whole[1:], abs=TOLERANCE)
        and distance(small / "stopped-10", small / "two-10") == 0
    )
    launch(small, "train_fsdp.py", "fewer", changes=[SHORT])
    assert distance(small / "fewer-10", small / "whole-10") < 1e-3


@pytest.mark.nightly
def test_a_signal_during_a_compilation_does_not_reach_the_compiler(small, tmp_path):
    """torchrun and Slurm signal all processes; a training whose compiler has died would wait for it."""
    script = small / "train_fsdp.py"
    script.write_text(script.read_text().replace("BF16 = COMPILE =", "COMPILE = True\nBF16 ="))
    status, printed = signal_while_compiling(signal.SIGTERM, small, tmp_path / "compiled", script.name)
    assert status == 0 and list(small.glob("train_fsdp-[12]/.metadata")), printed


@pytest.mark.nightly
def test_tensor_parallelism_in_two_groups_equals_one_process(small):
    speed = "{speed:,.0f} {unit}/s"
    text = (small / "job.py").read_text()
    assert speed in text
    (small / "job.py").write_text(text.replace(speed, "{items} {unit}"))
    whole = launch(small, "train_fsdp.py", changes=[SHORT])
    printed = launch(small, "train_fsdp_tp.py", processes=4, changes=[SHORT])
    assert losses(printed) == pytest.approx(losses(whole), abs=TOLERANCE)
    tokens = [re.findall(r"(\d+) tokens", text) for text in (whole, printed)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2  # both ranks of a group have the same ones
    assert distance(small / "train_fsdp_tp-10", small / "train_fsdp-10") < 1e-3


@pytest.mark.nightly
def test_the_gradients_of_lora_adapters_are_averaged_and_only_adapters_are_saved(small):
    assert "no model train_fsdp-NUMBER: train it" in launch(small, "finetune_lora.py", fails=True)
    launch(small, "train_fsdp.py", changes=[SHORT])
    one, two = (launch(small, "finetune_lora.py", str(n), processes=n, changes=[SHORT]) for n in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=TOLERANCE) and losses(one)[1] < losses(one)[0] - 0.2
    assert distance(small / "1-10", small / "2-10") < 1e-3
    names = {name.split(".")[-1] for name in checkpoint(small / "2-10")["model"]}
    assert names == {"a", "b"}


# --- a checkpoint for one device


@pytest.mark.parametrize(("script", "flags"), [
    ("train_gpt.py", "--shard 2"),
    *(pytest.param(*words, marks=pytest.mark.nightly) for words in (
        ("train_gpt.py", "--pp 2 --schedule zbv"), ("train_gpt.py", "--tp 2"), ("train_fsdp.py", ""))),
])  # fmt: skip
def test_an_exported_checkpoint_has_on_one_device_the_loss_that_was_printed(small, script, flags):
    words = [*flags.split(), "--epochs", 1, "--checkpoint", "saved"] if flags else ["saved"]
    printed = launch(small, script, *words, processes=2, changes=[] if flags else [SHORT])
    folder = max(small.glob("saved-*"), key=lambda path: int(path.name[6:]))
    assert "27 tensors" in run(small, sys.executable, "export.py", folder)
    gpt = names_of(small / "gpt.py")
    model = gpt["GPT"]()
    model.load_state_dict(load_file(f"{folder}.safetensors"))
    inputs, targets = gpt["make_datasets"]()[1].tensors
    with torch.no_grad():
        loss = model(inputs, targets).item() / gpt["count"](targets)
    assert loss == pytest.approx(float(re.findall(r"validation ([\d.]+)", printed)[-1]), abs=1e-5)


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


# --- the pipeline


@pytest.fixture(scope="module")
def uncut():
    """The losses of the uncut model, which accumulates the gradients of the same microbatches; two epochs."""
    script = names_of(SCRIPTS / "train_pipeline.py")
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
    kill = "        while epoch and rank:\n            file_of(args.checkpoint, 48, 0).exists() and os._exit(1)\n"
    launch(copy, *words, processes=2, changes=[(rename, kill + rename)], fails=True)
    kept = {file.name for file in copy.glob("*.pt")}
    assert kept == {f"train_pipeline-{name}.pt" for name in ("24-stage0", "48-stage0", "24-stage1")}
    assert losses(launch(copy, *words, processes=2)) == pytest.approx(uncut[1:], abs=TOLERANCE)
    (copy / "train_pipeline-48-stage0.pt").rename(copy / "train_pipeline-96-stage0.pt")
    assert "{0, 96}, {0, 48}] steps: move them away" in launch(copy, *words, processes=2, fails=True)


@pytest.mark.nightly
def test_a_pipeline_validates_every_image_also_of_a_set_smaller_than_a_batch(copy):
    data = (copy / "train_ddp.py").read_text()
    assert "[1536, 261]" in data
    (copy / "train_ddp.py").write_text(data.replace("[1536, 261]", "[1787, 10]"))
    printed = launch(copy, "train_pipeline.py", "--epochs", 1, "--cut", 3, processes=2)
    script = names_of(copy / "run.py")
    model, (_, check) = script["make_layers"](), script["make_dataset"]()
    for stage in (0, 1):
        model.load_state_dict(torch.load(copy / f"train_pipeline-27-stage{stage}.pt")["model"], strict=False)
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

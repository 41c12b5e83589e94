"""The scripts to take home, for the tests that change a copy of them, launch it and read what it printed and saved."""

import copy
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from project import inherited
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from worker_jobs import scontrol, until

from mpdemo.jobs import check as check_script
from mpdemo.jobs import slurm
from mpdemo.jobs.slurm_job import look_up
from mpdemo.paths import root

SCRIPTS = root() / "notebooks" / "scripts"
FIRST = "EPOCHS, BATCH, WORKERS = "  # the constants of a script that tests change
UPDATE = "        optimizer.step()\n"  # the line of each script before which a test does something
TROUBLE = root() / "tests" / "programs" / "trouble.py"
IMPORTED = "__import__('trouble')"
RECORD = "@record  #"  # the line after a script's constants and before main
SLURM = 120  # s in which a job comes so far
SBATCH_LINES = 53  # of train.sbatch at most


def environment() -> dict:
    """Return the environment of a user's shell, in which this Python is active."""
    kept = inherited("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(folder, *command, fails=False, seconds=120) -> str:
    """Run a command in a folder, for at most two minutes; return what it printed."""
    how = {"cwd": folder, "env": environment(), "capture_output": True, "text": True, "timeout": seconds}
    done = subprocess.run([*map(str, command)], **how)
    assert (done.returncode != 0) == fails, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr * fails


def change(source, changes, target=None):
    """Replace texts in a file, each of which must be there; in place, or in a copy."""
    text = source.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (target or source).write_text(text)


def launch(folder, script, *arguments, processes=1, changes=(), **how) -> str:
    """Run a script, in which some texts are changed, under torchrun; return what it printed."""
    change(folder / script, changes, folder / "run.py")
    return run(
        folder, "torchrun", "--standalone", f"--nproc-per-node={processes}", "run.py", *arguments, **how
    )


def names_of(script, *arguments, run_name="script") -> dict:
    """Return what a script defines, given arguments; it imports from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)
        patch.setattr(sys, "argv", [str(script), *arguments])
        for module in ("gpt", "job", "train_gpt", "train_ddp"):
            patch.setitem(sys.modules, module, None)  # afterwards all are what they were
            del sys.modules[module]
        return runpy.run_path(str(script), run_name=run_name)


def losses(printed) -> list:
    """Return the loss of each epoch."""
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", printed)]


def told(printed) -> dict:
    """Return what is said of each step and each epoch, without what was measured."""
    return dict(re.findall(r"((?:step|epoch) \d+): (loss [\d.]+, \w+ [\d.]+)", printed))


def content(checkpoint) -> str:
    """Return all of a checkpoint as one process would have saved it, bit for bit."""
    return json.dumps(loaded(checkpoint), default=torch.Tensor.tolist, sort_keys=True)


def loaded(checkpoint) -> dict:
    """Return the state in a checkpoint."""
    if checkpoint.is_file():
        return torch.load(checkpoint)
    dcp_to_torch_save(checkpoint, checkpoint.with_suffix(".whole"))
    return torch.load(checkpoint.with_suffix(".whole"), weights_only=False)


def shorten(folder):
    """Give the GPT a text of ten batches: two epochs of five steps."""
    change(folder / "gpt.py", [(":-256", ":160"), ("-256:", "-64:")])


# --- a script that saves often, for those who kill it


class Kind(NamedTuple):
    """How a script is changed so that it looks after each step and saves after every `unit` of them."""

    unit: int
    step: str  # the number of the step, before the optimizer makes it
    looks: str  # the file with these constants
    changes: list
    spoilt: tuple = ()  # the line before which a loss may be spoilt, and what it is called there
    loop: str = ""  # the file with the loop, where the script imports it


def own(spoilt=()) -> Kind:
    """Return the kind of a script that brings all that it needs: two epochs of 24 steps."""
    changes = [
        ("LOOK = 8", "LOOK = 1"),
        ("SAVE_MINUTES = 60", "SAVE_MINUTES = 10"),
        (FIRST + "5", FIRST + "2"),
    ]
    return Kind(10, "done", "", changes, spoilt)


def by_job(spoilt=()) -> Kind:
    """Return the kind of a script that imports job.py: two epochs, of five steps with the short text."""
    changes = [("LOOK = 10", "LOOK = 1"), ("SAVE_MINUTES = 100", "SAVE_MINUTES = 2")]
    return Kind(2, "run.done + 1", "job.py", changes, spoilt)


KINDS = {
    "train_single": own(),
    "train_ddp": own(("        optimizer.zero_grad()\n", "loss")),
    "train_fsdp": by_job(("        due = run.look(", "losses")),
    "finetune_lora": by_job()._replace(loop="train_fsdp.py"),
    "train_gpt": by_job(),
}
# of train_gpt.py, by the number of processes
MESHES = {1: [], 2: ["--tp", "2"], 4: ["--pp", "2", "--shard", "2"]}


class Training:
    """A script in a folder of its own."""

    def __init__(self, name, folder):
        self.name, self.folder, self.kind = name, Path(folder), KINDS[name]
        self.unit = self.kind.unit

    @property
    def looks(self) -> Path:
        """Return the file with the constants that say when it looks and saves."""
        return self.folder / (self.kind.looks or f"{self.name}.py")

    @classmethod
    def anew(cls, name, folder):
        """Copy the scripts, and let this one save often."""
        shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("found"))
        shutil.copy(TROUBLE, folder)
        shorten(Path(folder))
        training = cls(name, folder)
        change(training.looks, training.kind.changes)
        return training

    def copied(self, folder):
        """Return another one with the same checkpoints."""
        copied = copy.copy(self)
        copied.folder = Path(shutil.copytree(self.folder, folder))
        return copied

    def command(self, name, processes=2) -> list:
        """Return the words that start it, with checkpoints of a name; run.py is the script."""
        if self.name == "train_single":
            return [sys.executable, "run.py", name]
        return [
            "torchrun",
            "--standalone",
            f"--nproc-per-node={processes}",
            "run.py",
            *self.words(name, processes),
        ]

    def words(self, name, processes=2) -> list:
        """Return the script's arguments; a batch of 30 can be divided by two processes and by three."""
        if self.name == "train_ddp":
            return [name]
        if self.name == "train_gpt":
            return [*MESHES[processes], "--checkpoint", name]
        return [
            "--checkpoint",
            name,
            "--batch",
            "30",
            *(["--base", "base"] if self.name == "finetune_lora" else []),
        ]

    def run(self, name, *changes, processes=2, prefix=(), **how) -> str:
        """Run it, in which some texts are changed; return what it printed."""
        self.change(*changes)
        return run(self.folder, *prefix, *self.command(name, processes), **how)

    def change(self, *changes):
        """Write the script, in which some texts are changed, as run.py, and the loop that it imports."""
        loop = self.kind.loop
        elsewhere = [pair for pair in changes if loop and pair[0] == UPDATE]
        own = [pair for pair in changes if pair not in elsewhere]
        change(self.folder / f"{self.name}.py", own, self.folder / "run.py")
        if loop:
            change(SCRIPTS / loop, elsewhere, self.folder / loop)

    def at(self, step, rank, trouble) -> tuple:
        """Return a change: before the update of a step, this befalls a rank."""
        line = f"        {IMPORTED}.befall({trouble!r}, {self.kind.step} == {step}, {rank})\n"
        return (UPDATE, line + UPDATE)

    def blind(self, rank) -> tuple:
        """Return a change: a rank looks for its checkpoints in another folder."""
        line = 'CHECKPOINT = Path("elsewhere") / CHECKPOINT'
        if self.kind.looks:
            line = '(argv := __import__("sys").argv)[argv.index("--checkpoint") + 1] = "elsewhere/a"'
        other = f'if __import__("os").environ["RANK"] == "{rank}":\n    {line}\n'
        return (RECORD, f"{other}\n\n{RECORD}")

    def full_disk(self) -> tuple:
        """Return what to put before a command, and a name for checkpoints: there's no room for more than those of "a".

        Where only root may mount a disk, a limit on the size of files stands for it.
        """
        size = max(4096, sum(map(len, self.data("a").values())))
        if os.getuid():
            return ["prlimit", f"--fsize={size // 8}"], "a"
        (self.folder / "disk").mkdir(exist_ok=True)
        mount = f'mount -t tmpfs -o size={size * 5 // 4} none disk; mv a-* disk; "$@"; status=$?; cp -r disk/a-* .; '
        return ["unshare", "--mount", "sh", "-c", mount + "exit $status", "sh"], "disk/a"

    def saved(self, name) -> list:
        """Return the complete checkpoints of a name, the oldest first."""
        found = [
            *self.folder.glob(f"{name}-*.pt"),
            *(file.parent for file in self.folder.glob(f"{name}-*/.metadata")),
        ]
        return sorted((path for path in found if path.suffix != ".damaged"), key=steps_of)

    def steps(self, name) -> list:
        """Return after how many steps the checkpoints of a name were written."""
        return [steps_of(checkpoint) for checkpoint in self.saved(name)]

    def data(self, name) -> dict:
        """Return every byte of the checkpoints of a name."""
        files = [file for path in self.saved(name) for file in (path, *path.glob("*")) if file.is_file()]
        return {file: file.read_bytes() for file in files}


def steps_of(checkpoint) -> int:
    return int(checkpoint.stem.rpartition("-")[2])


def damage(checkpoint, how):
    """Spoil a file of a checkpoint, as a node that goes down does, or a disk that is getting old."""
    file, first, length = checkpoint, 0, checkpoint.stat().st_size
    if checkpoint.is_dir():  # the largest tensor: a flipped bit between two small ones would harm nobody
        parts = FileSystemReader(checkpoint).read_metadata().storage_data.values()
        largest = max(parts, key=lambda part: part.length)
        file, first, length = checkpoint / largest.relative_path, largest.offset, largest.length
    data = bytearray(file.read_bytes())
    data[first + length // 2] ^= 1
    if how == "missing" and file != checkpoint:
        file.unlink()
    else:
        file.write_bytes({"truncated": data[: len(data) // 2], "flipped": data, "missing": b""}[how])


# --- the batch script, and what Slurm does to its job


def submit(folder, command, *options, changes=()) -> str:
    """Submit the batch script with a command in its last lines; return the job's number."""
    text = (folder / "train.sbatch").read_text()
    assert len(text.splitlines()) <= SBATCH_LINES and check_script(text, "throwaway", ask_slurm=False) == []
    name, *arguments = command.split(" ", 1)
    checkpoints = [('train_ddp.py "$CHECKPOINT"', " ".join([name, *(arguments or ['"$CHECKPOINT"'])]))]
    change(folder / "train.sbatch", [("module load pytorch", "#"), *checkpoints, *changes])
    return run(folder, "sbatch", "--parsable", *options, "train.sbatch").strip()


def log_of(folder) -> str:
    return "".join(path.read_text() for path in folder.glob("*.out"))


def asked(*words) -> str:
    """Return what a client of Slurm answers, in one word."""
    return slurm.client(words[0], "--noheader", *words[1:]).strip()


def reach_limit(job):
    """Move a job's time limit close; Slurm looks every 30 s."""
    scontrol("update", f"jobid={job}", "EndTime=now+45")


def preempt(job, grace=0):
    """Let an urgent job take the node with the batch script, after so many seconds of grace."""
    scontrol("update", "partition=debug", f"GraceTime={grace}")
    node = asked("squeue", f"--jobs={job}", "--format=%B")
    urgent = "--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null"
    slurm.client("sbatch", *urgent, "--wrap=sleep 2")


def lose(cluster, node):
    """Cut the power of a node, and start it again."""
    cluster.kill_node(node)
    scontrol("update", f"nodename={node}", "state=down", "reason=power")
    cluster.start_node(node)
    until(lambda: asked("sinfo", f"--nodes={node}", "--format=%T") == "idle", SLURM)


def start_now(job):
    """Wait until a job is back in the queue, and let it start."""
    until(lambda: look_up(job).state != "running", SLURM)
    time.sleep(2)  # a node refuses a job that starts again within the second of its end
    scontrol("update", f"jobid={job}", "StartTime=now", "TimeLimit=30")

"""The batch script of notebook 10 that continues on the nodes that are left: run as it stands there, a node killed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from worker_jobs import until

from mpdemo.cluster import Cluster
from mpdemo.paths import root

SCRIPTS = root() / "notebooks" / "scripts"
# For the throw-away nodes: one process on each, which has no GPU to use, and a Python that is already there.
SMALLER = {"gpus-per-node=4": "gpus-per-node=1", "cpus-per-task=32": "cpus-per-task=2", "module load pytorch": ""}
# Slow enough to lose a node on the way; the last of the checkpoints is then never far.
SLOWER = {
    "        optimizer.step()\n": "        optimizer.step()\n        time.sleep(0.1)\n",
    "SAVE_STEPS, SAVE_MINUTES = 60, 15": "SAVE_STEPS, SAVE_MINUTES = 20, 15",
}
PRINTED = 1.5e-6  # of a loss with six decimals, whose sum may be in another order


def replaced(text, words) -> str:
    """Return a text with other words, each of which it must hold."""
    for old, new in words.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def recipe() -> str:
    """Return the batch script that notebook 10 shows."""
    cells = nbformat.read(root() / "notebooks" / "10_checkpoint.ipynb", as_version=4).cells
    blocks = [block for cell in cells for block in re.findall(r"^```bash\n(.*?)^```", cell.source, re.M | re.S)]
    (script,) = (block for block in blocks if "#SBATCH --no-kill" in block)
    return script


def run(folder, *command) -> str:
    """Run a command in a folder, with this Python's programs; return what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(log) -> list:
    """Return the loss of each epoch."""
    return [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", log)]


@pytest.mark.nightly
def test_three_of_four_nodes_continue_from_the_last_checkpoint_with_the_same_losses(
    slurm_programs, tmp_path, monkeypatch
):
    script = (SCRIPTS / "train_ddp.py").read_text()
    (tmp_path / "train_ddp.py").write_text(replaced(script, SLOWER))
    (tmp_path / "elastic.sbatch").write_text(replaced(recipe(), SMALLER))
    shutil.copy(SCRIPTS / "digits.npz", tmp_path)
    with Cluster.up(nodes=4) as cluster:
        if cluster.network == "none":
            pytest.skip("nodes without addresses of their own: torchrun cannot tell them apart")
        monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
        job = run(tmp_path, "sbatch", "--parsable", "--output=log", "elastic.sbatch").strip()
        log = tmp_path / "log"
        until(lambda: log.exists() and "step 40:" in log.read_text(), 90)
        cluster.kill_node("node3")
        before = len(log.read_text())
        state = "JobState=(COMPLETED|FAILED|NODE_FAIL|TIMEOUT|CANCELLED)"
        until(lambda: re.search(state, run(tmp_path, "scontrol", "show", "job", "-o", job)), 180)
        assert "JobState=COMPLETED" in run(tmp_path, "scontrol", "show", "job", "-o", job), log.read_text()[-3000:]
    after = log.read_text()[before:]
    assert re.findall(r"rank (\d) of (\d)", after).count(("2", "3")) == 1 and "of 4" not in after
    assert re.findall(r"step (\d+):", after)[0] == "48"  # the first look after the checkpoint of step 40
    whole = run(tmp_path, "torchrun", "--standalone", "--nproc-per-node=1", SCRIPTS / "train_ddp.py", "whole")
    assert losses(log.read_text()) == pytest.approx(losses(whole), abs=PRINTED) and len(losses(whole)) == 5

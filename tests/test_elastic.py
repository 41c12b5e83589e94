"""The batch script of notebook 55 that continues on the nodes that are left: run as it stands there, a node killed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from worker_jobs import until

from mpdemo.jobs.slurm_job import look_up
from mpdemo.paths import root
from mpdemo.tools.cluster import Cluster

SCRIPTS = root() / "notebooks" / "scripts"
STEP = "  optimizer.step()\n"
SLOWER = {STEP: f"{STEP}        time.sleep(0.1)\n", "SAVE_MINUTES = 60": "SAVE_MINUTES = 20"}
SMALLER = {
    "gpus-per-node=4": "gpus-per-node=1",
    "cpus-per-task=32": "cpus-per-task=2",
    "module load pytorch": "",
}


def replaced(text, words) -> str:
    for old, new in words.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def run(folder, *command) -> str:
    """Run a command in a folder, with this Python's programs; return what it printed."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.check_output(command, cwd=folder, env=env, text=True, timeout=120)


def losses(log) -> list:
    return [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", log)]


@pytest.mark.nightly
def test_three_of_four_nodes_continue_with_the_same_losses(slurm_programs, tmp_path, monkeypatch):
    cells = nbformat.read(root() / "notebooks" / "55_how_often.ipynb", as_version=4).cells
    blocks = [
        block for cell in cells for block in re.findall(r"^```bash\n(.*?)^```", cell.source, re.M | re.S)
    ]
    (recipe,) = (block for block in blocks if "#SBATCH --no-kill" in block)
    (tmp_path / "elastic.sbatch").write_text(replaced(recipe, SMALLER))
    (tmp_path / "train_ddp.py").write_text(replaced((SCRIPTS / "train_ddp.py").read_text(), SLOWER))
    shutil.copy(SCRIPTS / "digits.npz", tmp_path)
    with Cluster.up(nodes=4) as cluster:
        if cluster.network == "none":
            pytest.skip("nodes without addresses of their own: torchrun cannot tell them apart")
        monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
        job, log = (
            run(tmp_path, "sbatch", "--parsable", "--output=log", "elastic.sbatch").strip(),
            tmp_path / "log",
        )
        until(lambda: log.exists() and "step 40:" in log.read_text(), 90)
        cluster.kill_node("node3")
        before = len(log.read_text())
        until(lambda: look_up(job).state != "running", 180)
        assert look_up(job).state == "done", log.read_text()[-3000:]
    after = log.read_text()[before:]
    assert "rank 2 of 3" in after and " of 4" not in after
    assert re.findall(r"step (\d+):", after)[0] == "48"  # the first look after the checkpoint of step 40
    whole = run(
        tmp_path, "torchrun", "--standalone", "--nproc-per-node=1", SCRIPTS / "train_ddp.py", "whole"
    )
    assert losses(log.read_text()) == pytest.approx(losses(whole), abs=1.5e-6) and len(losses(whole)) == 5

"""The batch script of notebook 55 that continues on the nodes that are left: run as it stands there, a node killed."""

import re
import shutil

import pytest
from home_scripts import SCRIPTS, UPDATE, change, launch, losses, run
from project import bash_blocks
from worker_jobs import ended, until

from mpdemo.tools.cluster import Cluster

SLOWER = [(UPDATE, f"{UPDATE}        time.sleep(0.1)\n"), ("SAVE_MINUTES = 60", "SAVE_MINUTES = 20")]
SMALLER = [
    ("gpus-per-node=4", "gpus-per-node=1"),
    ("cpus-per-task=32", "cpus-per-task=2"),
    ("module load pytorch", ""),
]


@pytest.mark.nightly
def test_three_of_four_nodes_continue_with_the_same_losses(slurm_programs, tmp_path, monkeypatch):
    (recipe,) = (block for block in bash_blocks("55_how_often") if "#SBATCH --no-kill" in block)
    folder, log = shutil.copytree(SCRIPTS, tmp_path / "scripts"), tmp_path / "scripts/log"
    (folder / "elastic.sbatch").write_text(recipe)
    change(folder / "elastic.sbatch", SMALLER)
    whole = losses(launch(folder, "train_ddp.py", "whole"))
    change(folder / "train_ddp.py", SLOWER)
    with Cluster.up(nodes=4) as cluster:
        if cluster.network == "none":
            pytest.skip("nodes without addresses of their own: torchrun cannot tell them apart")
        monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
        job = run(folder, "sbatch", "--parsable", "--output=log", "elastic.sbatch").strip()
        until(lambda: log.exists() and "step 40:" in log.read_text(), 90)
        cluster.kill_node("node3")
        before = len(log.read_text())
        assert ended(job, 180) == "done", log.read_text()[-3000:]
    after = log.read_text()[before:]
    assert "rank 2 of 3" in after and " of 4" not in after
    assert re.findall(r"step (\d+):", after)[0] == "48"  # the first look after the checkpoint of step 40
    assert losses(log.read_text()) == pytest.approx(whole, abs=1.5e-6) and len(whole) == 5

"""The committed sbatch files. That a notebook writes just these, and that they run, is in test_notebooks.py."""

import subprocess

import pytest

from mpdemo import paths
from mpdemo.jobs import check

SCRIPTS = sorted((paths.root() / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_belongs_to_a_notebook_and_is_sound(script):
    notebooks = (paths.root() / "notebooks").glob("*.ipynb")
    assert any(f"slurm/{script.name}" in notebook.read_text() for notebook in notebooks), "no notebook writes it"
    problems = check(script.read_text(), "generic", ask_slurm=False)
    assert [problem for problem in problems if "folder of --output" not in problem.message] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_accepts_a_script(cluster, script):
    done = subprocess.run(["sbatch", "--test-only", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr

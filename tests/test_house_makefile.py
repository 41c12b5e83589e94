"""The rules of the Makefile that remove something, or that only look."""

import os
import shutil
import subprocess

from mpdemo import paths


def make(folder, *words):
    """Run make with the project's Makefile in another folder, as from a shell: not as a part of `make test`."""
    shutil.copy(paths.root() / "Makefile", folder)
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clean_removes_what_runs_and_tools_left_and_never_the_answers(tmp_path):
    kept = ["work/00_3.py", "slurm/mine/03_ddp.sbatch", "slurm/sites/mine.toml", ".venv/bin/python", "mpdemo/a.py"]
    made = [
        "runs/ddp/summary.json",
        "mpdemo/jobs/__pycache__/a.pyc",
        ".pytest_cache/x",
        "slurm-7.out",
        "slurm/slurm-8.err",
    ]
    made += ["notebooks/.ipynb_checkpoints/00.ipynb"]
    for name in (*kept, *made, "tests/a.py", "notebooks/00.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    said = make(tmp_path, "clean")
    assert [name for name in made if (tmp_path / name).exists()] == []
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert "kept: work/" in said
    make(tmp_path, "clean")  # nothing to remove is no error


def test_lint_runs_every_check_that_executes_nothing(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    said = make(tmp_path, "--dry-run", "lint")
    for command in ("ruff check .", "ruff format --check .", "lint-imports", "tests/notebooks.py --check"):
        assert command in said
    assert "bin/pytest" not in said and "-m pytest" not in said


def test_the_last_words_of_make_test_are_those_of_the_tests_that_always_run(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()  # newer than pyproject.toml: nothing is installed
    commands = [line for line in make(tmp_path, "--dry-run", "test").splitlines() if "-m pytest" in line]
    assert commands[0].endswith("tests/gpu") and "-n 3" in commands[-1]  # without a GPU the first runs no test

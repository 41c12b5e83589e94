"""The house rules that no linter knows: light imports, make, skips."""

import os
import pkgutil
import shutil
import subprocess
import sys
import tomllib

from mpdemo.paths import root

PACKAGE = root() / "mpdemo"


def python(code) -> str:
    """Run a few lines in a fresh interpreter; return what they printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=root(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_front_end_modules_load_without_torch():
    """Not even in passing: import-linter sees only what they import themselves."""
    contracts = tomllib.loads((root() / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    light = next(
        contract["source_modules"] for contract in contracts if "torch" in contract.get("forbidden_modules", [])
    )
    names = [name for module in light for name in (module, *inside(module))]
    assert python(f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
                  "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')") == ""  # fmt: skip


def inside(module) -> list:
    """Return the modules of a package."""
    folder = PACKAGE.parent / module.replace(".", "/")
    return [f"{module}.{info.name}" for info in pkgutil.iter_modules([str(folder)])]


def test_a_front_end_with_little_memory_can_submit_jobs():
    """The interpreter with `mpdemo.jobs` stays small; a kernel that loads PyTorch takes 552 MiB."""
    assert int(python("import psutil, mpdemo.jobs; print(psutil.Process().memory_info().rss)")) / 2**20 < 50


def test_every_module_can_be_imported():
    """Some are imported by jobs alone; a name that moved is missed there late."""
    names = [info.name for info in pkgutil.walk_packages([str(PACKAGE)], "mpdemo.") if info.name != "mpdemo.__main__"]
    python(f"import importlib\nfor name in {names}: importlib.import_module(name)")


def make(folder, *words) -> str:
    """Run make with the project's Makefile in another folder, as from a shell: not as a part of `make test`."""
    shutil.copy(root() / "Makefile", folder)
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_clean_removes_what_runs_and_tools_left_and_never_the_answers(tmp_path):
    kept = ["work/00_3.py", "slurm/mine/03.sbatch", "slurm/sites/mine.toml", ".venv/bin/python", "mpdemo/a.py"]
    made = ["runs/ddp/summary.json", "mpdemo/jobs/__pycache__/a.pyc", ".pytest_cache/x", "slurm-7.out"]
    made += ["slurm/slurm-8.err", "notebooks/.ipynb_checkpoints/00.ipynb"]
    for name in (*kept, *made, "tests/a.py", "notebooks/00.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert "kept: work/" in make(tmp_path, "clean")
    assert [name for name in made if (tmp_path / name).exists()] == []
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    make(tmp_path, "clean")  # nothing to remove is no error


def test_make_lint_executes_nothing_and_make_test_ends_with_tests_that_always_run(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()  # newer than pyproject.toml: nothing is installed
    lint, test = make(tmp_path, "--dry-run", "lint"), make(tmp_path, "--dry-run", "test")
    checks = ("ruff check .", "ruff format --check .", "lint-imports", "tests/notebooks.py --check")
    assert all(check in lint for check in checks) and "pytest" not in lint
    commands = [line for line in test.splitlines() if "-m pytest" in line]
    assert commands[0].endswith("tests/gpu") and "-n 3" in commands[-1]  # without a GPU the first runs no test


def test_in_ci_a_skip_fails_the_run_and_is_named(tmp_path):
    passes = "import pytest\ndef test_it():\n    pass\n@pytest.mark.xfail\ndef test_that_fails():\n    assert 0\n"
    (tmp_path / "test_0.py").write_text(passes)
    options = ["-p", "skips", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]

    def run(ci):
        env = os.environ | {"CI": ci, "PYTHONPATH": str(root() / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run([sys.executable, "-m", "pytest", *options], env=env, capture_output=True, timeout=60)
        return done.returncode, "ERROR: 2 skipped, and in CI none may be" in done.stdout.decode()

    assert run("true") == (0, False)
    (tmp_path / "test_1.py").write_text("import pytest\ndef test_one():\n    pytest.skip('no such program')\n")
    (tmp_path / "test_2.py").write_text("import pytest\npytest.skip('no module', allow_module_level=True)\n")
    assert run("true") == (1, True) and run("") == (0, False)

"""The house rules that no linter knows: light imports, make, skips."""

import os
import pkgutil
import re
import subprocess
import sys
import tomllib

from mpdemo.paths import root

PACKAGE = root() / "mpdemo"


def python(code) -> str:
    """Run a few lines in a fresh interpreter; return what they printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_front_end_modules_load_without_torch_and_every_module_can_be_imported():
    """Not even in passing: import-linter sees only what they import themselves. Some are imported by jobs alone."""
    contracts = tomllib.loads((root() / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    light = next(
        each["source_modules"] for each in contracts if "torch" in each.get("forbidden_modules", [])
    )
    names = [name for name in modules() for module in light if f"{name}.".startswith(f"{module}.")]
    python(f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
           "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')\n"
           f"for name in {modules()}: importlib.import_module(name)")  # fmt: skip


def test_the_plugin_costs_a_pytest_of_others_nothing():
    """Each run of pytest in an environment with mpdemo imports it."""
    import_it = "import sys, pytest; old = set(sys.modules); import mpdemo.tools.same.pytest_plugin"
    new = python(f"{import_it}\nprint(*sorted(set(sys.modules) - old))").split()
    assert new == ["mpdemo", "mpdemo.tools", "mpdemo.tools.same", "mpdemo.tools.same.pytest_plugin"]


def modules() -> list:
    """Return the names of the package's modules."""
    return [
        info.name
        for info in pkgutil.walk_packages([str(PACKAGE)], "mpdemo.")
        if info.name != "mpdemo.__main__"
    ]


def test_a_front_end_with_little_memory_can_submit_jobs():
    """The interpreter with `mpdemo.jobs` stays small; a kernel that loads PyTorch takes 552 MiB."""
    assert int(python("import psutil, mpdemo.jobs; print(psutil.Process().memory_info().rss)")) / 2**20 < 50


ENTERED = """
import os, runpy, sys
entered, end = set(), os._exit
def enter(frame, event, _):
    if event == "call" and frame.f_code.co_flags & 1:  # a function; the body of a class or module has no such flag
        entered.add(frame.f_code.co_filename)
def tell(status):
    sys.setprofile(None)
    ours = sorted(name for name in entered if name.startswith(os.environ["ROOT"]))
    print(*ours, sep="\\n", flush=True)
    end(status)
os._exit = tell
sys.setprofile(enter)
runpy.run_module("mpdemo.rungs.ddp", run_name="__main__", alter_sys=True)
"""
# fewer would fold files that each have an idea of their own: cuts, loaders, log, schedules
MOST_ENTERED = 19


def test_a_rank_of_a_training_enters_few_of_our_files(tmp_path, monkeypatch):
    """What a learner steps through, from the options to the summary."""
    world = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29688",
        "ROOT": f"{root()}/mpdemo/",
    }
    words = ["--model", "convnet", "--steps", "2", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", ENTERED, *words]
    done = subprocess.run(command, env=os.environ | world, capture_output=True, text=True, timeout=120)
    files = {line for line in done.stdout.splitlines() if line.endswith(".py")}
    assert done.returncode == 0 and 10 < len(files) <= MOST_ENTERED, "\n".join([*files, done.stderr])


def test_make_clean_removes_what_runs_and_tools_left_and_never_the_answers(tmp_path):
    kept = [
        "work/11.2.py",
        "slurm/mine/03.sbatch",
        "slurm/sites/mine.sbatch",
        ".venv/bin/python",
        "mpdemo/run.py",
        "tests/conftest.py",
    ]
    made = ["runs/ddp/summary.json", "mpdemo/jobs/__pycache__/a.pyc", ".pytest_cache/x", "slurm-7.out"]
    made += ["slurm/slurm-8.err", "notebooks/.ipynb_checkpoints/00.ipynb"]
    for name in (*kept, *made):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    # as from a shell: not as a part of `make test`
    make = ["make", "-f", str(root() / "Makefile"), "clean"]
    for _ in range(2):  # nothing to remove is no error
        done = subprocess.run(make, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "kept: work/" in done.stdout, done.stderr
    assert [name for name in made if (tmp_path / name).exists()] == []
    assert [name for name in kept if not (tmp_path / name).exists()] == []


def test_in_ci_a_skip_fails_the_run_and_is_named(tmp_path):
    passes = "import pytest\ndef test_it():\n    pass\n@pytest.mark.xfail\ndef test_that_fails():\n    assert 0\n"
    (tmp_path / "test_0.py").write_text(passes)
    options = ["-p", "skips", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]

    def run(ci):
        env = os.environ | {
            "CI": ci,
            "PYTHONPATH": str(root() / "tests"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options], env=env, capture_output=True, timeout=60
        )
        return done.returncode, "ERROR: 2 skipped, and in CI none may be" in done.stdout.decode()

    assert run("true") == (0, False)
    (tmp_path / "test_1.py").write_text(
        "import pytest\ndef test_one():\n    pytest.skip('no such program')\n"
    )
    (tmp_path / "test_2.py").write_text(
        "import pytest\npytest.skip('no module', allow_module_level=True)\n"
    )
    assert run("true") == (1, True) and run("") == (0, False)


def test_an_action_of_others_is_pinned_by_its_commit():
    used = [
        use
        for file in (root() / ".github").rglob("*.yml")
        for use in re.findall(r"uses: (\S+)", file.read_text())
    ]
    assert used and all(re.fullmatch(r"\./.*|[\w./-]+@[0-9a-f]{40}", use) for use in used), used

"""The house rules that no linter knows: few files at the top, small rungs, small differences, light imports."""

import pkgutil
import subprocess
import sys

import pytest

from mpdemo.notebook.diff import changed_lines
from mpdemo.paths import root
from mpdemo.settings import RUNGS

PACKAGE = root() / "mpdemo"
LESSONS = [  # what the notebooks show side by side
    ("single.py", "data_parallel.py", None),
    ("single.py", "ddp.py", None),
    ("data_parallel.py", "ddp.py", None),
    (("single.py", "Single"), ("one_process.py", "CutOverDevices"), None),
    (("single.py", "Single.step"), ("model_parallel.py", "PerDevice.step"), None),
    ("model_parallel.py", "pipeline.py", None),
    (("ddp.py", "DDP"), ("hybrid.py", "OneProcess"), None),
    (("ddp.py", "DDP"), ("fsdp.py", "FSDP"), None),
    (("single.py", "Single"), ("tensor.py", "Tensor"), None),
]
LIGHT = (
    "jobs",
    "cluster",
    "notebook.show",
    "notebook.diff",
    "notebook.explorer",
    "notebook.live_view",
    "notebook.ranks",
    "notebook.plots",
    "doctor",
    "settings",
    "plan",
    "plan.planner",
    "plan.scaling",
    "trainers.classroom",
    "trainers.rehearse",
    "trainers.render",
    "trainers.scale",
    "plan.choose",
    "notebook.tables",
)


def test_the_top_of_the_package_is_a_short_list():
    assert len(list(PACKAGE.glob("*.py"))) <= 12
    assert not [folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and not list(folder.glob("*.py"))
                and folder.name != "__pycache__"]  # fmt: skip


def test_the_rungs_are_short():
    lines = {rung: len((PACKAGE / f"parallel/{rung}.py").read_text().splitlines()) for rung in RUNGS}
    assert sum(lines.values()) < 450, lines


@pytest.mark.parametrize(("before", "after", "name"), LESSONS, ids=str)
def test_the_difference_of_two_rungs_is_the_lesson_alone(before, after, name):
    before, after = (
        (f"parallel/{side[0]}", side[1]) if isinstance(side, tuple) else f"parallel/{side}" for side in (before, after)
    )
    assert 0 < changed_lines(before, after, name) <= 25


@pytest.mark.parametrize("module", LIGHT)
def test_front_end_modules_load_without_torch(module):
    code = f"import mpdemo.{module}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root(), check=True, timeout=60)


def test_a_front_end_with_little_memory_can_submit_jobs():
    """The interpreter with `mpdemo.jobs` stays small; a kernel that loads PyTorch takes 552 MiB."""
    code = "import psutil, mpdemo.jobs; print(psutil.Process().memory_info().rss)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root(), check=True, capture_output=True, text=True)
    assert int(done.stdout) / 2**20 < 50


def test_every_module_can_be_imported():
    """Some are imported by jobs alone; a name that moved is missed there late."""
    names = [info.name for info in pkgutil.walk_packages([str(PACKAGE)], "mpdemo.") if info.name != "mpdemo.__main__"]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and len(names) > 150, done.stderr

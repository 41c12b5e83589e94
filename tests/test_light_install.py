"""The tools without the course: in an environment that holds what the package itself needs, and nothing else."""

import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from project import inherited

from mpdemo.paths import root


def needed(requirements, names=None) -> set:
    """Return the names of the distributions that some requirements bring in, without extras."""
    names = set() if names is None else names
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in names:
            names.add(requirement.name)
            needed(distribution(requirement.name).requires or [], names)
    return names


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """Run `mpdemo` in an environment with its core dependencies alone, which are links to those of this one."""
    folder = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
    packages = next((folder / "venv/lib").glob("python*/site-packages"))
    core = tomllib.loads((root() / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in needed(core):
        for top in {
            file.parts[0] for file in distribution(name).files if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(distribution(name).locate_file(top)).resolve())
    (packages / "mpdemo").symlink_to(root() / "mpdemo")
    env = inherited("PYTHONPATH", "PYTEST_CURRENT_TEST")
    command = [folder / "venv/bin/python", "-m", "mpdemo"]

    def run(*words):
        return subprocess.run(
            [*command, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=200
        )

    return run


def test_explain_needs_no_pytorch(light):
    done = light("explain", str(root() / "tests/logs/a01_watchdog.txt"))
    assert done.returncode == 0 and "Watchdog caught collective" in done.stdout, done.stderr


def test_same_runs_a_script_with_the_python_of_another_environment(light):
    script = root() / "notebooks/scripts/first_ddp.py"
    done = light("same", "--python", sys.executable, "--", str(script))
    assert done.returncode == 0 and "2 processes: same" in done.stdout, done.stdout + done.stderr


def test_what_needs_pytorch_says_what_to_install(light):
    done = light("demo")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "not installed" in done.stderr

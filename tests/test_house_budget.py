"""How large each room may be: lowered as a room shrinks, and raised only by a commit that says for what."""

import pytest
from project import files

from mpdemo.paths import root

# Lines of all .py, docstrings and blank lines included, formatted by ruff: a budget is for what a room does, not for
# how tightly it is written. A name that begins with / is a file or folder of mpdemo.
BUDGET = {
    "mpdemo": 15_595,
    "notebooks/labs notebooks/checks notebooks/scripts": 4_156,
    "tests": 12_600,
    "/__main__.py /errors.py /settings.py /options.py /rules.py /schedules.py /cuts.py /paths.py /waits.py": 798,
    "/rungs": 451,
    "/run.py /training": 1_272,
    "/world /ranks": 1_565,
    "/models": 711,
    "/data": 430,
    "/timeline /recorder.py": 298,
    "/plan": 2_368,
    "/jobs": 2_347,
    "/notebook": 1_834,
    "/cluster": 596,
    "/trainers": 705,
    "/demo.py /bench.py /doctor.py /compare.py /trial.py /paired.py": 913,
    "/same": 1_289,
    "/labs": 9,
}
FILES = 145  # in mpdemo
PYTHON = [file for file in files() if file.suffix == ".py"]


def lines(places) -> int:
    """Count the lines of all Python in some files and folders."""
    folders = [f"mpdemo{place}" if place[0] == "/" else place for place in places.split()]
    inside = [file for file in PYTHON if any(file.is_relative_to(folder) for folder in folders)]
    return sum(len((root() / file).read_text().splitlines()) for file in inside)


@pytest.mark.parametrize(("places", "budget"), BUDGET.items())
def test_a_room_keeps_to_its_budget(places, budget):
    assert lines(places) <= budget, f"{places}: make it smaller; only another room's budget may be given to it"


def test_the_package_has_few_files_and_each_belongs_to_a_room():
    package = [file for file in PYTHON if file.is_relative_to("mpdemo")]
    assert len(package) <= FILES, "merge modules that have one user"
    rooms = sum(lines(places) for places in BUDGET if places[0] == "/") + lines("/__init__.py")
    assert rooms == lines("mpdemo"), "a file of mpdemo is in no room of BUDGET, or in two"

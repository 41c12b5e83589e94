"""How large each room may be. A number here is only ever lowered: what a room gains, it gives up elsewhere."""

import pytest
from project import files

from mpdemo.paths import root

# Lines of all .py, docstrings and blank lines included, formatted by ruff: a budget is for what a room does, not for
# how tightly it is written. A name that begins with / is a file or folder of mpdemo.
BUDGET = {
    "mpdemo": 25_239,
    "notebooks/labs notebooks/checks notebooks/scripts notebooks/take_home": 199,
    "tests": 15_465,
    "/__main__.py /errors.py /settings.py /options.py /savings.py /schedules.py /cuts.py /grid.py /paths.py": 960,
    "/rungs /parallel": 931,
    "/run.py /checkpoint.py /log.py /training": 1_272,
    "/world.py /launch.py /cores.py /ranks.py /world": 907,
    "/models": 633,
    "/data": 493,
    "/timeline": 443,
    "/plan": 3_503,
    "/jobs": 3_182,
    "/notebook": 2_659,
    "/cluster": 986,
    "/trainers /scale /rehearse /classroom": 1_127,
    "/demo.py /bench.py /doctor.py /bench": 846,
    "/labs": 2_980,
    "/exercises": 4_308,
}
FILES = 252  # in mpdemo
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

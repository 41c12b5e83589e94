"""How large each room may be, and what it is for: lowered as a room shrinks, raised only with a reason."""

import pytest
from project import files

from mpdemo.paths import root

# Lines of all .py, docstrings and blank lines included, formatted by ruff: a budget is for what a room does, not for
# how tightly it is written. A place that begins with / is a file or folder of mpdemo.
ROOMS = [
    (
        "/__init__.py /__main__.py /errors.py /paths.py /terminal.py /front_end.py",
        461,
        "what is public; commands, and how errors are told",
    ),
    ("/settings /options.py", 508, "every setting said once and checked once"),
    ("/rungs", 459, "what differs between the strategies: model, optimizer, step"),
    ("/run.py /training", 1_420, "the loop, and what stands around a step: checkpoints, log, recorder, stop signal"),
    ("/world /ranks", 1_524, "who am I; start and end processes; ranks beside a kernel"),
    ("/models", 921, "the course's models as lists of blocks, and a reader's own"),
    ("/data", 419, "data sets and batches, a share per replica"),
    ("/measure /paired.py", 541, "measure a step, compare by paired rounds, read what was recorded"),
    ("/plan", 2_553, "what fits: count on fake tensors, choose, split, simulate, scale"),
    ("/jobs", 3_152, "spec, fitted job, text, submission, following; sites; failures explained"),
    ("/same", 2_731, "is a reader's script the same training on 1 and N processes?"),
    ("/notebook", 1_632, "what notebooks show: live view, ladder, plots, checks of exercises"),
    ("/cluster", 454, "a throw-away Slurm"),
    ("/trainers /demo.py /doctor.py", 589, "a class's rehearsal, the demo, the check of a machine"),
    ("/labs", 9, "where notebooks/labs is imported from"),
    (
        "notebooks/labs notebooks/checks notebooks/scripts",
        6_539,  # the scripts carry what keeps a run alive on a cluster, and one has every dimension
        "what jobs measure, exercises run and readers take home",
    ),
    ("tests", 18_500, "each promise once by day, the rest by night"),
]
FILES = 158  # in mpdemo
PYTHON = [file for file in files() if file.suffix == ".py"]


def lines(places) -> int:
    """Count the lines of all Python in some files and folders."""
    folders = [f"mpdemo{place}" if place[0] == "/" else place for place in places.split()]
    inside = [file for file in PYTHON if any(file.is_relative_to(folder) for folder in folders)]
    return sum(len((root() / file).read_text().splitlines()) for file in inside)


@pytest.mark.parametrize(("places", "budget", "what"), ROOMS)
def test_a_room_keeps_to_its_budget(places, budget, what):
    assert lines(places) <= budget, f"{places} ({what}): make it smaller; what is given to it, another room gives up"


def test_the_package_has_few_files_and_each_belongs_to_one_room():
    package = [file for file in PYTHON if file.is_relative_to("mpdemo")]
    assert len(package) <= FILES, "merge modules that have one user"
    assert sum(lines(places) for places, *_ in ROOMS if places[0] == "/") == lines("mpdemo")

"""How large each room may be, and what it is for: lowered as a room shrinks, raised only with a reason."""

import pytest
from project import files, tokens

from mpdemo.paths import root

# Tokens of Python without comments, docstrings, line ends and indents: what a reader has to understand, however
# sparsely it is written. A place that begins with / is a file or folder of mpdemo.
COURSE = [
    (
        "/__init__.py /__main__.py /errors.py /foreign.py /options.py /paths.py /front_end.py /labs",
        3_400,
        "what is public; commands, options, how errors are told, and how files of others are read",
    ),
    ("/settings", 2_480, "every setting said once and checked once"),
    ("/rungs /run.py", 3_650, "the strategies and their loop: model, optimizer, step"),
    (
        "/training",
        3_950,
        "what a strategy is built from, the stages of a cut model, the run's log, recorded steps",
    ),
    ("/world /ranks", 8_560, "who am I; start and end processes; ranks beside a kernel"),
    (
        "/models /data",
        4_960,
        "the course's models as lists of blocks; data sets and batches, a share per replica",
    ),
    (
        "/measure/__init__.py /measure/compare.py /measure/paired.py /measure/timeline.py /measure/trial.py",
        4_500,
        "measure a step, compare by paired rounds, what a recorded step waits for",
    ),
    (
        "/measure/spans.py /measure/traces.py /measure/transfers.py",
        4_910,
        "traces of torch.profiler, of all ranks, on gloo and on GPUs: events, messages and memory of a step",
    ),
    ("/predict", 3_000, "before a run: the simulator of schedules, live memory counted"),
    ("/jobs", 12_950, "spec, sites, batch script, check, submission, following"),
    (
        "/notebook /demo.py",
        14_520,  # 2,600 of it draw small tensors with who has what, and what is sent
        "what notebooks show: live view, ladder, plots, the step player's page, checks of exercises; the demo",
    ),
]
TOOLS = [
    (
        "/tools/same",
        30_810,
        "is a reader's script the same training on 1 and N processes, does it resume; in CI, too",
    ),
    (
        "/tools/plan",
        # each operation as a GPU computes it, eager and compiled, offload and its host, what each row was compared with
        22_960,
        "what fits: any model on fake tensors, and every strategy",
    ),
    (
        "/tools/explain",
        14_130,
        "the first cause in a log, which log, what Slurm says, where the ranks of a hanging job are",
    ),
    ("/tools/cluster", 3_050, "a throw-away Slurm"),
    (
        "/tools/support /tools/terminal.py /tools/__init__.py",
        6_180,
        "a machine and a site tried, batch scripts rendered, the course's jobs rehearsed",
    ),
]
REST = [
    (
        "notebooks/labs notebooks/checks notebooks/scripts",
        81_410,  # the scripts carry what keeps a run alive on a cluster; a check warns one rank of two
        "what jobs measure, exercises run and readers take home",
    ),
    (
        "tests",
        192_700,  # what proves that one chain of clues fits an incident is a test, and stood in the labs
        "each promise once by day, the rest by night; 11,400 of it are public bugs to score a tool on",
    ),
]
# How many files each may have.
FILES = {"course": (COURSE, 90), "tools": (TOOLS, 71)}
LARGEST = 300  # lines of a module
# lines of its script and style sheet: eleven strategies modelled, drawn, played, guessed and broken
PLAYER = 1_220
PYTHON = [file for file in files() if file.suffix == ".py"]


def inside(places) -> list:
    """Return the Python files of some files and folders."""
    folders = [f"mpdemo{place}" if place[0] == "/" else place for place in places.split()]
    return [file for file in PYTHON if any(file.is_relative_to(folder) for folder in folders)]


def tokens_of(places) -> int:
    """Count the tokens of some files and folders."""
    return sum(tokens((root() / file).read_text()) for file in inside(places))


def test_docstrings_comments_and_layout_cost_nothing():
    dense, sparse = 'x = f(1, "a")', '"""Say why."""\n\nx = f(\n    1,  # one\n    "a"\n)\n'
    assert tokens(dense) == tokens(sparse) == 8


@pytest.mark.parametrize(("places", "budget", "what"), [*COURSE, *TOOLS, *REST])
def test_a_room_keeps_to_its_budget(places, budget, what):
    assert tokens_of(places) <= budget, (
        f"{places} ({what}): make it smaller; what is given to it, another room gives up"
    )


@pytest.mark.parametrize("whole", FILES)
def test_the_course_and_the_tools_have_few_files(whole):
    rooms, number = FILES[whole]
    assert sum(len(inside(places)) for places, *_ in rooms) <= number, "merge modules that have one user"


def test_what_a_reader_of_the_course_should_read_is_short():
    """The five parts that the package's page lists."""
    parts = ["/run.py /rungs", "/models /data", "/training", "/world /ranks"]
    measure = next(places for places, *_ in COURSE if "/measure/compare.py" in places)
    assert sum(map(tokens_of, [*parts, measure])) <= 27_000


def test_the_player_keeps_to_its_lines():
    """A script that a reader can read, and not a library: it has no tokens of Python, so its lines are counted."""
    found = [file for file in files() if file.suffix in (".js", ".css") and file.is_relative_to("mpdemo")]
    lines = [line for file in found for line in (root() / file).read_text().splitlines()]
    assert len(found) == 2 and len(lines) <= PLAYER and max(map(len, lines)) <= 120


def test_each_file_of_the_package_belongs_to_one_room():
    package = [file for file in PYTHON if file.is_relative_to("mpdemo")]
    assert sorted(package) == sorted(file for places, *_ in [*COURSE, *TOOLS] for file in inside(places))
    long = [file for file in package if len((root() / file).read_text().splitlines()) > LARGEST]
    assert not long, f"longer than {LARGEST} lines: {long}"

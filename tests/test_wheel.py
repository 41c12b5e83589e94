"""The wheel that a class installs: all that the notebooks need is in it, and it works without a checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from project import fresh_copy, inherited

from mpdemo.notebook.check import exercises
from mpdemo.paths import root
from mpdemo.tools.support.render import jobs_of_course

SLURM = root() / "slurm"
LAB = """
from mpdemo.jobs import JobSpec, submit
job = submit(JobSpec("hello", ("-m", "mpdemo.labs.hello"), "runs/hello", processes_per_node=2, gpus_per_process=0))
print(job.wait(120), job.log())
"""
CHECKS = """
from pathlib import Path
from mpdemo.notebook.check import check
check({number!r}, {wrong!r})
check({number!r}, {right!r})
Path("work").mkdir(exist_ok=True)
Path("work/10.1.py").write_text({program!r})
check("10.1")
"""
ALONE = """
from mpdemo.notebook.course import run, show
assert "DistributedDataParallel" in show("scripts/train_ddp.py").data["text/markdown"]
print(run("python notebooks/scripts/first_single.py").output())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the wheel without a network; return a function that runs Python in a folder with notebooks alone."""
    pytest.importorskip("hatchling", reason="the build backend; enable with: pip install hatchling")
    folder = tmp_path_factory.mktemp("installed")
    copy, here = fresh_copy(folder / "copy"), folder / "class"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(copy)]
    subprocess.run(wheel, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "site", "zip")  # as pip does, which takes seconds
    shutil.rmtree(copy)
    shutil.copytree(
        root() / "notebooks", here, ignore=lambda _, names: [n for n in names if not n.endswith(".ipynb")]
    )
    env = inherited("MPDEMO_ROOT", "MPDEMO_SITE", "SLURM_CONF", "PYTEST_CURRENT_TEST")
    env |= {"PYTHONPATH": str(folder / "site"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def run(*words, where=here, **more):
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=where, env=env | more, capture_output=True, text=True, timeout=300
        )
        assert str(root()) not in done.stdout, done.stdout
        return done.stdout + done.stderr

    run.folder = folder
    return run


def test_it_finds_its_sites_and_batch_scripts(installed):
    code = "import mpdemo.jobs.site as s, mpdemo.paths as p; print(s.__file__, p.root(), *s.site_files(), sep='\\n')"
    file, here, *names = installed("-c", code).splitlines()
    assert (installed.folder / "site/mpdemo/py.typed").is_file()
    assert Path(file).is_relative_to(installed.folder / "site") and Path(here) == installed.folder / "class"
    assert sorted(names) == sorted(file.stem for file in (SLURM / "sites").rglob("*.sbatch"))
    assert "[OK]   site leonardo: 4 GPUs and 32 cores per node" in installed(
        "-m", "mpdemo", "env", "--site", "leonardo", COURSE_ACCOUNT="a"
    )
    installed("-m", "mpdemo", "render", "--site", "jeanzay")
    made = (installed.folder / "class/slurm/jeanzay").glob("*.sbatch")
    assert len(list(made)) == len(jobs_of_course())
    shutil.rmtree(installed.folder / "class/slurm")


def test_a_check_judges_a_prediction_and_a_program(installed):
    solutions = nbformat.read(root() / "notebooks/solutions/10_two_devices.ipynb", as_version=4)
    task = next(cell.source for cell in solutions.cells if cell.source.startswith("%%task 10.1\n"))
    number, row = next((n, row) for n, row in exercises().items() if isinstance(row.get("right"), str))
    answers = {
        "right": row["right"],
        "wrong": next(other for other in row["choices"] if other != row["right"]),
    }
    said = installed(
        "-c", CHECKS.format(number=number, program=task.partition("\n")[2], **answers)
    ).splitlines()
    verdicts = [f"{number}: not y", f"{number}: right", "10.1: right"]
    assert [line[:11] for line in said if line[2:3] == "."] == verdicts, said


def test_a_copy_of_the_folder_of_notebooks_works_alone(installed):
    """Its root is the folder around it, as in a checkout, for the solutions too: scripts are found, runs go there."""
    alone = installed.folder / "alone"
    shutil.copytree(root() / "notebooks", alone / "notebooks", ignore=shutil.ignore_patterns("__pycache__"))
    where = "from mpdemo.paths import root; print(root())"
    for opened in ("notebooks", "notebooks/solutions"):
        assert installed("-c", where, where=alone / opened) == f"{alone}\n"
    assert "loss" in installed("-c", ALONE, where=alone / "notebooks")
    assert {path.name for path in alone.iterdir()} == {"notebooks", "runs", "slurm"}
    assert installed("-c", where, where=alone / "notebooks/solutions") == f"{alone}\n"


def test_a_labs_job_runs(installed):
    said = installed("-c", LAB)
    assert "done" in said and "rank 1 of 2" in said, said

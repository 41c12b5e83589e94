"""The labs run from wherever you work; those written with other tools train what our loop trains, step by step."""

import os
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import ROUNDING, losses, summary
from worlds import run_worlds

from mpdemo.jobs import JobSpec, submit
from mpdemo.notebook.recipe import recipe
from mpdemo.paths import root
from mpdemo.settings import Settings

STEPS = 3


def output(folder, *words):
    """What ``python WORDS`` prints in a folder."""
    environ = {name: value for name, value in os.environ.items() if name != "MPDEMO_ROOT"} | {"PYTHONPATH": str(root())}
    run = {"cwd": folder, "env": environ, "capture_output": True, "text": True, "timeout": 60, "check": True}
    return subprocess.run([sys.executable, *words], **run).stdout


def test_a_lab_runs_in_any_folder_and_ones_own_comes_first(tmp_path):
    assert output(tmp_path, "-m", "mpdemo.labs.hello").startswith("rank 0 of 1")
    own = tmp_path / "notebooks" / "labs" / "hello.py"
    own.parent.mkdir(parents=True)
    own.write_text('print("changed")\n')
    assert output(tmp_path, "-m", "mpdemo.labs.hello") == "changed\n"


def test_small_files_are_measured_on_every_disk_and_removed(tmp_path):
    """What they cost beside one file is for notebook 08 to say: a busy machine may show anything."""
    (disk := tmp_path / "disk").mkdir()
    output(tmp_path, "-m", "mpdemo.labs.small_files", str(tmp_path), str(disk), str(tmp_path))
    rows = {(row["disk"], row["files"]): row for row in summary(tmp_path)["rows"]}
    assert set(rows) == {(str(place), files) for place in (disk, tmp_path) for files in ("many", "one")}
    assert all(row[what] > 0 for row in rows.values() for what in ("write", "read first", "read again"))
    assert list(disk.iterdir()) == []


def test_the_package_imports_no_lab():
    """What both need is in the package; a lab is started as a program."""
    labs = [path.stem for path in (root() / "notebooks/labs").glob("*.py")]
    for file in (root() / "mpdemo").rglob("*.py"):
        words = file.read_text()
        named = [lab for lab in labs if f"from mpdemo.labs.{lab} " in words or f"import mpdemo.labs.{lab}" in words]
        assert not named, f"{file} imports {named}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of a lab, in one process and in two."""
    folder = tmp_path_factory.mktemp("labs")
    runs = {n: folder / f"two_devices{n}" for n in (1, 2)}
    run_worlds(folder, [[n, "notebooks/labs/ddp_two_devices.py", str(out), str(STEPS)] for n, out in runs.items()])
    return runs


def test_two_processes_train_what_one_trains(trained):
    one, two = (losses(trained[n]) for n in (1, 2))
    assert two == pytest.approx(one, rel=ROUNDING) and list(one) == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def ours(tmp_path_factory, run_once):
    """The folder of the course model's training by our own loop."""
    out = tmp_path_factory.mktemp("ours")
    settings = recipe("single", epochs=1, steps=STEPS, log_every=1, out=str(out))
    done = run_once("-m", "mpdemo", "train", *Settings(**settings).arguments())
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def same_training(out, ours):
    own_losses, wanted = losses(out), losses(ours)
    assert list(own_losses) == list(wanted) == list(range(1, STEPS + 1))
    assert own_losses == pytest.approx(wanted, rel=ROUNDING)
    for name in ("validation_loss", "validation_accuracy"):
        assert summary(out)[name] == pytest.approx(summary(ours)[name], rel=1e-3)


def test_lightning_in_one_process(ours, run_once, tmp_path):
    done = run_once("-m", "mpdemo.labs.lightning_training", str(tmp_path), str(STEPS), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    same_training(tmp_path, ours)
    drawn = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.value for event in drawn] == pytest.approx(list(losses(tmp_path).values()), rel=1e-6)
    assert (summary(tmp_path)["num_nodes"], summary(tmp_path)["devices"]) == (1, 1)


def test_on_two_nodes_of_a_slurm_the_same_is_trained(ours, trained, cluster, project):
    """Lightning, and DDP over a model on two devices in each process."""
    nodes = 1 if cluster.network == "none" else 2  # else node names do not resolve
    places = {"nodes": nodes, "processes_per_node": 2 // nodes}
    labs = {"lightning": "lightning_training", "two_devices": "ddp_two_devices"}
    commands = {name: ("-m", f"mpdemo.labs.{lab}", f"runs/{name}", STEPS) for name, lab in labs.items()}
    jobs = [submit(JobSpec(name=n, command=c, out=f"runs/{n}", **places)) for n, c in commands.items()]
    for job in jobs:
        assert job.wait(300) == "done", job.log()
    same_training(project / "runs/lightning", ours)
    written = summary(project / "runs/lightning")
    assert (written["num_nodes"], written["devices"]) == (nodes, 2 // nodes)
    assert losses(project / "runs/two_devices") == pytest.approx(losses(trained[1]), rel=ROUNDING)
    assert len(set(summary(project / "runs/two_devices")["hosts"])) == nodes

"""Lightning and Horovod's calls train what our loop trains: the same loss in every step."""

import json

import pytest

from mpdemo.jobs import JobSpec, submit
from mpdemo.labs.horovod_calls import BATCH
from mpdemo.notebook.story import story
from mpdemo.notebook.tables import scalars
from mpdemo.settings import Settings, checked
from mpdemo.training.loop import train
from mpdemo.world.env import World

STEPS = 3
ROUNDING = 2e-5  # float32, summed in another order


def losses(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["event"] == "step"}


def summary(out):
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The folder of the story by our own loop, in this process."""
    out = tmp_path_factory.mktemp("ours")
    settings = story("single", epochs=1, steps=STEPS, log_every=1, out=str(out))
    assert train(checked(Settings(**settings)), World()) == 0
    return out


def same_training(out, ours):
    own_losses, wanted = losses(out), losses(ours)
    assert list(own_losses) == list(wanted) == list(range(1, STEPS + 1))
    assert own_losses == pytest.approx(wanted, rel=ROUNDING)
    for name in ("validation_loss", "validation_accuracy"):
        assert summary(out)[name] == pytest.approx(summary(ours)[name], rel=1e-3)


def test_lightning_in_one_process(ours, run_once, tmp_path):
    done = run_once("-m", "mpdemo.labs.lightning_story", str(tmp_path), str(STEPS), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    same_training(tmp_path, ours)
    drawn = [pytest.approx(loss, rel=1e-6) for loss in losses(tmp_path).values()]
    assert [value for _, value in scalars(tmp_path / "tensorboard")["train/loss"]] == drawn
    assert (summary(tmp_path)["num_nodes"], summary(tmp_path)["devices"]) == (1, 1)


def test_lightning_on_two_nodes_of_a_slurm(ours, cluster, project):
    nodes = 1 if cluster.network == "none" else 2  # else node names do not resolve
    command = ("-m", "mpdemo.labs.lightning_story", "runs/lightning", STEPS)
    places = {"nodes": nodes, "processes_per_node": 2 // nodes}
    job = submit(JobSpec(name="lightning", command=command, out="runs/lightning", **places))
    assert job.wait(300) == "done", job.log()
    same_training(project / "runs/lightning", ours)
    written = summary(project / "runs/lightning")
    assert (written["num_nodes"], written["devices"]) == (nodes, 2 // nodes)


def test_horovods_calls_in_one_process_and_in_two(run_once, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for out, words in ((one, ()), (two, launcher)):
        done = run_once(*words, "-m", "mpdemo.labs.horovod_calls", str(out), OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr[-3000:]
    assert losses(two) == pytest.approx(losses(one), rel=ROUNDING)
    assert losses(one)[12] < losses(one)[1] and BATCH % 2 == 0
    assert (summary(one)["ranks"], summary(two)["ranks"]) == ([0], [0, 1])

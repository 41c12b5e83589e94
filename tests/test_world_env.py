"""Rank and device of a process: the variables of torchrun, of Slurm's srun, of a real Slurm, and none."""

import json
import os
import subprocess
import sys
import tomllib

import pytest
import torch

from mpdemo.errors import UserError
from mpdemo.paths import root
from mpdemo.world import devices
from mpdemo.world.env import read_launcher, where_am_i
from mpdemo.world.launch import OLDEST, warn

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {  # as Slurm 22.05 sets them; the real one is asked below
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
ALONE = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "launcher": "none"}


def place(values):
    return tuple(values[name] for name in ("launcher", "rank", "world_size", "local_rank", "local_world_size"))


def test_no_launcher():
    assert read_launcher({}) == ALONE
    assert read_launcher({"WORLD_SIZE": "4", "MASTER_ADDR": "node1"}) == ALONE  # what a shell may have kept
    assert where_am_i({}).device == torch.device("cpu")


def test_torchrun():
    assert place(read_launcher(TORCHRUN)) == ("torchrun", 3, 4, 1, 2)
    assert place(read_launcher(SRUN | TORCHRUN)) == ("torchrun", 3, 4, 1, 2)  # torchrun inside a Slurm job


@pytest.mark.parametrize(("node", "on_node"), [(0, 2), (2, 2), (3, 1)])
def test_srun_with_uneven_nodes(node, on_node):
    assert place(read_launcher(SRUN | {"SLURM_NODEID": str(node)})) == ("slurm", 6, 7, 0, on_node)


def test_srun_of_fewer_tasks_than_the_job():
    """``srun --ntasks=2`` in a job of 7: the step counts."""
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    assert place(read_launcher(SRUN | step | {"SLURM_LOCALID": "1"})) == ("slurm", 1, 2, 1, 2)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"], ids=["no step", "batch", "interactive"])
def test_batch_script_is_no_task(step):
    environ = {k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP")} | {"SLURM_PROCID": "0"}
    if step:
        environ |= {"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"}
    assert read_launcher(environ) == ALONE


def test_shell_in_a_terminal_is_no_task():
    """``srun --pty bash``: a user types there, and may start processes with --processes."""
    one = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    assert read_launcher(SRUN | one)["launcher"] == "slurm"
    assert read_launcher(SRUN | one | {"SLURM_PTY_PORT": "39959"}) == ALONE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE=,"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5"),
    ],
)
def test_contradictions_are_refused(change, named):
    environ = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(UserError, match=f"not the numbers of a launch by torchrun: .*{named}"):
        read_launcher(environ)


class FakeGPUs:
    """Stands for torch.cuda on a node with `count` GPUs; the only stand-in of this file."""

    def __init__(self, monkeypatch, count):
        self.current = None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(self, "current", index))


def test_gpu_of_the_local_rank(monkeypatch):
    gpus = FakeGPUs(monkeypatch, 2)
    world = where_am_i(TORCHRUN)
    assert (world.device, gpus.current) == (torch.device("cuda", 1), 1)
    assert "nccl" in world.backend


def test_gpu_bound_by_slurm_is_number_0(monkeypatch):
    FakeGPUs(monkeypatch, 1)
    tasks = {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "1"}
    assert where_am_i(SRUN | tasks).device == torch.device("cuda", 0)
    assert where_am_i(SRUN | tasks | {"SLURM_GPUS_ON_NODE": "2"}).device == torch.device("cuda", 0)
    with pytest.raises(UserError, match="local rank 1 has no GPU of its own: 2 processes on this node, 1 GPUs visible"):
        where_am_i(SRUN | tasks | {"SLURM_GPUS_ON_NODE": "1"})  # --gres=gpu:1 for two tasks: both see the same one


def test_a_process_with_two_gpus_begins_with_the_first_of_its_own(monkeypatch):
    from mpdemo.settings import Settings, checked
    from mpdemo.training.command import check_gpus
    from mpdemo.training.setup import local_devices

    gpus = FakeGPUs(monkeypatch, 4)
    world = where_am_i(TORCHRUN, devices=2)
    assert (world.device, gpus.current) == (torch.device("cuda", 2), 2)
    assert [device.index for device in local_devices(world.device, 2)] == [2, 3]
    FakeGPUs(monkeypatch, 3)
    with pytest.raises(UserError, match="4 processes need 4 GPUs, 3 visible; start fewer"):
        check_gpus(checked(Settings(rung="ddp", processes=4)))
    with pytest.raises(UserError, match="2 devices wanted from GPU 2 on, 3 GPUs visible; lower --devices"):
        local_devices(world.device, 2)


def test_more_ranks_than_gpus(monkeypatch):
    from mpdemo.settings import Settings, checked
    from mpdemo.training.command import check_gpus

    FakeGPUs(monkeypatch, 1)
    with pytest.raises(UserError, match="local rank 1 has no GPU.*2 processes on this node, 1 GPUs visible"):
        where_am_i(TORCHRUN)
    with pytest.raises(UserError, match="2 processes need 2 GPUs, 1 visible"):
        check_gpus(checked(Settings(rung="ddp")))


CLAIM = """
import os, sys, torch
from mpdemo.world import env
env.LOCK = sys.argv[1]
world = env.World(rank=1, world_size=int(sys.argv[2]), local_rank=1, local_world_size=int(sys.argv[2]))
env.claim_cores(world, int(sys.argv[3]))
print(sorted(os.sched_getaffinity(0)), torch.get_num_threads(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def claims(tmp_path):
    """Start a process that claims cores, as one of so many on this machine; returns it and the cores that it has."""
    started = []
    for core in os.sched_getaffinity(0):
        (tmp_path / f"cpu{core}").mkdir()

    def claim(processes, count=1):
        words = [sys.executable, "-c", CLAIM, str(tmp_path / "cpu{}"), str(processes), str(count)]
        child = subprocess.Popen(words, cwd=root(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        cores, _, threads = child.stdout.readline().rpartition(" ")
        assert threads == "1\n"
        return child, json.loads(cores)

    yield claim
    for child in started:
        child.communicate(timeout=20)


def test_a_process_takes_cores_that_no_other_has_taken(claims):
    """Of any job; a killed process gives them back. Where there are too few nothing is pinned."""
    allowed = sorted(os.sched_getaffinity(0))
    assert claims(len(allowed) + 1)[1] == allowed
    processes = [claims(1) for _ in allowed]
    assert [cores for _, cores in processes] == [[core] for core in allowed]
    assert claims(1)[1] == allowed
    processes[-1][0].kill()
    processes[-1][0].wait(20)
    assert claims(1)[1] == [allowed[-1]]


def test_a_process_that_drives_several_devices_takes_all_their_cores_or_none(claims):
    allowed = sorted(os.sched_getaffinity(0))
    first, cores = claims(1, len(allowed))
    assert cores == allowed
    first.communicate(timeout=20)
    assert claims(1)[1] == allowed[:1]
    assert claims(1, len(allowed))[1] == allowed
    if len(allowed) > 1:
        assert claims(1)[1] == [allowed[1]], "what it could not use stays free"


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        ([("a", {0, 1})] * 4, 2),
        ([("a", {0}), ("a", {1}), ("a", {0, 1})], 2),
        ([("a", {0}), ("a", {1})], None),
        ([("a", {0, 1})] * 2 + [("b", {0, 1})] * 2, None),
    ],
    ids=["four on two", "some pinned", "one each", "two machines"],
)
def test_cores_are_shared_where_all_machines_have_fewer_than_processes(ranks, shared, monkeypatch):
    assert devices.shared_cores() is None
    monkeypatch.setattr("mpdemo.world.collectives.gather_objects", lambda value: ranks)
    assert devices.shared_cores() == shared


def test_the_oldest_versions_are_those_of_the_project():
    lines = tomllib.loads((root() / "pyproject.toml").read_text())["project"]["optional-dependencies"]["course"]
    assert {f"{package}>={version}" for package, version in OLDEST.items()} <= set(lines)


def test_a_message_has_the_rank_in_front_where_there_is_one(monkeypatch, capsys):
    warn("no file x")
    monkeypatch.setenv("SLURM_PROCID", "3")
    warn("saved")
    monkeypatch.setenv("RANK", "1")
    warn("saved")
    assert capsys.readouterr().err == "mpdemo: no file x\nmpdemo: rank 3: saved\nmpdemo: rank 1: saved\n"


JOB = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks=3 --output={{out}}/log
{sys.executable} {root()}/tests/programs/environ.py {{out}}
srun {sys.executable} {root()}/tests/programs/environ.py {{out}}
"""


def test_real_slurm(cluster, tmp_path):
    """The variables that Slurm itself sets in a batch script and in three tasks on two nodes."""
    (tmp_path / "job.sh").write_text(JOB.format(out=tmp_path))
    subprocess.run(["sbatch", "--wait", tmp_path / "job.sh"], check=True, capture_output=True, timeout=100)
    places = [place(read_launcher(json.loads(file.read_text()))) for file in tmp_path.glob("*.json")]
    assert sorted(places) == [
        ("none", 0, 1, 0, 1),  # the batch script
        ("slurm", 0, 3, 0, 2),
        ("slurm", 1, 3, 1, 2),
        ("slurm", 2, 3, 0, 1),
    ]

"""Rank and device of a process: the variables of torchrun, of Slurm's srun, of a real Slurm, and none."""

import multiprocessing
import os
import subprocess
import tomllib

import pytest
import torch
from worlds import FORKS

from mpdemo.errors import UserError
from mpdemo.paths import root
from mpdemo.tools.support.site_trial import OLDEST
from mpdemo.training.setup import local_devices
from mpdemo.world import devices, env
from mpdemo.world.env import read_launcher, where_am_i
from mpdemo.world.say import log

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


def place(values):
    return tuple(
        values[name] for name in ("launcher", "rank", "world_size", "local_rank", "local_world_size")
    )


def step_of(tasks, rank, **more):
    """What a step of srun on the first node changes in the variables of a job."""
    step = {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
    }
    return SRUN | step | {"SLURM_NODEID": "0"} | more


NO_STEP = {k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP")} | {"SLURM_PROCID": "0"}


@pytest.mark.parametrize(("environ", "found"), [
    ({}, ("none", 0, 1, 0, 1)),
    ({"WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, ("none", 0, 1, 0, 1)),  # what a shell may have kept
    (TORCHRUN, ("torchrun", 3, 4, 1, 2)),
    (SRUN | TORCHRUN, ("torchrun", 3, 4, 1, 2)),  # torchrun inside a Slurm job
    (SRUN | {"SLURM_NODEID": "0"}, ("slurm", 6, 7, 0, 2)),
    (SRUN | {"SLURM_NODEID": "2"}, ("slurm", 6, 7, 0, 2)),
    (SRUN | {"SLURM_NODEID": "3"}, ("slurm", 6, 7, 0, 1)),
    # ``srun --ntasks=2`` in a job of 7: the step counts
    (step_of(2, 1, SLURM_LOCALID="1"), ("slurm", 1, 2, 1, 2)),
    (NO_STEP, ("none", 0, 1, 0, 1)),
    # a batch script
    (NO_STEP | {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "1"}, ("none", 0, 1, 0, 1)),
    # interactive
    (NO_STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, ("none", 0, 1, 0, 1)),
    (step_of(1, 0), ("slurm", 0, 1, 0, 1)),
    # a user types into ``srun --pty bash``, and may start processes with --processes
    (step_of(1, 0, SLURM_PTY_PORT="39959"), ("none", 0, 1, 0, 1)),
])  # fmt: skip
def test_the_place_is_that_of_whichever_launcher_started_the_process(environ, found):
    assert place(read_launcher(environ)) == found


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
    FakeGPUs(monkeypatch, 1)
    with pytest.raises(
        UserError, match="local rank 1 has no GPU.*2 processes on this node, 1 GPUs visible"
    ):
        where_am_i(TORCHRUN)


def test_gpu_bound_by_slurm_is_number_0(monkeypatch):
    FakeGPUs(monkeypatch, 1)
    tasks = {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "1"}
    assert where_am_i(SRUN | tasks).device == torch.device("cuda", 0)
    assert where_am_i(SRUN | tasks | {"SLURM_GPUS_ON_NODE": "2"}).device == torch.device("cuda", 0)
    with pytest.raises(
        UserError, match="local rank 1 has no GPU of its own: 2 processes on this node, 1 GPUs visible"
    ):
        # --gres=gpu:1 for two tasks: both see the same one
        where_am_i(SRUN | tasks | {"SLURM_GPUS_ON_NODE": "1"})


def test_a_process_with_two_gpus_begins_with_the_first_of_its_own(monkeypatch):
    gpus = FakeGPUs(monkeypatch, 4)
    world = where_am_i(TORCHRUN, devices=2)
    assert (world.device, gpus.current) == (torch.device("cuda", 2), 2)
    assert [device.index for device in local_devices(world.device, 2)] == [2, 3]
    FakeGPUs(monkeypatch, 3)
    with pytest.raises(UserError, match="2 devices wanted from GPU 2 on, 3 GPUs visible; lower --devices"):
        local_devices(world.device, 2)


def hold_cores(lock, processes, count, pipe):
    """In a process of its own: claim cores as local rank 1, and keep them until it is killed, or the tests end."""
    env.LOCK = lock
    env.claim_cores(
        env.World(rank=1, world_size=processes, local_rank=1, local_world_size=processes), count
    )
    pipe.send((sorted(os.sched_getaffinity(0)), torch.get_num_threads()))
    multiprocessing.parent_process().join()


@pytest.fixture
def claims(tmp_path):
    """Start a process that claims cores, as one of so many on this machine; returns it and the cores that it has."""
    started = []
    for core in os.sched_getaffinity(0):
        (tmp_path / f"cpu{core}").mkdir()

    def claim(processes, count=1):
        pipe, inside = FORKS.Pipe()
        child = FORKS.Process(target=hold_cores, args=(str(tmp_path / "cpu{}"), processes, count, inside))
        child.start()
        started.append(child)
        cores, threads = pipe.recv()
        assert threads == 1
        return child, cores

    yield claim
    for child in started:
        child.kill()
        child.join()


def test_a_process_takes_cores_that_no_other_has_taken(claims):
    """Of any job; a killed process gives them back. Where there are too few nothing is pinned."""
    allowed = sorted(os.sched_getaffinity(0))
    assert claims(len(allowed) + 1)[1] == allowed
    processes = [claims(1) for _ in allowed]
    assert [cores for _, cores in processes] == [[core] for core in allowed]
    assert claims(1)[1] == allowed
    processes[-1][0].kill()
    processes[-1][0].join()
    assert claims(1)[1] == [allowed[-1]]


def test_a_process_that_drives_several_devices_takes_all_their_cores_or_none(claims):
    allowed = sorted(os.sched_getaffinity(0))
    first, cores = claims(1, len(allowed))
    assert cores == allowed
    first.kill()
    first.join()
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
    lines = tomllib.loads((root() / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "course"
    ]
    assert {f"{package}>={version}" for package, version in OLDEST.items()} <= set(lines)


def test_a_message_has_the_rank_in_front_where_there_is_one(monkeypatch, capsys):
    log.warning("no file %s", "x")
    monkeypatch.setenv("SLURM_PROCID", "3")
    log.warning("saved")
    monkeypatch.setenv("RANK", "1")
    log.warning("saved")
    log.info("nobody asked")
    assert capsys.readouterr().err == "mpdemo: no file x\nmpdemo: rank 3: saved\nmpdemo: rank 1: saved\n"


JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks=3 --output={out}/log
write='env --null > $(mktemp {out}/XXXXXX.environ)'
bash -c "$write"
srun bash -c "$write"
"""


def test_real_slurm(cluster, tmp_path):
    """The variables that Slurm itself sets in a batch script and in three tasks on two nodes."""
    (tmp_path / "job.sh").write_text(JOB.format(out=tmp_path))
    subprocess.run(["sbatch", "--wait", tmp_path / "job.sh"], check=True, capture_output=True, timeout=100)
    texts = [file.read_text().split("\0") for file in tmp_path.glob("*.environ")]
    environments = [dict(line.partition("=")[::2] for line in lines) for lines in texts]
    assert sorted(place(read_launcher(environ)) for environ in environments) == [
        ("none", 0, 1, 0, 1),  # the batch script
        ("slurm", 0, 3, 0, 2),
        ("slurm", 1, 3, 1, 2),
        ("slurm", 2, 3, 0, 1),
    ]

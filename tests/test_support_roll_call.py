"""One row per rank: in real worlds, on one core, on nodes whose ranks use TCP; and what its rows say of GPUs."""

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from worlds import forked, start

from mpdemo.tools.support import env, links, roll_call
from mpdemo.tools.support.roll_call import nccl_transports, ranges, table, what_is_wrong
from mpdemo.world.env import World
from mpdemo.world.family import held_port

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def rows_of(text):
    """Return the cells of the table's rows."""
    return [
        re.split(" {2,}", line.strip())
        for line in text.splitlines()
        if re.match(r"(\d+: )?\d+ {2,}\S", line)
    ]


def test_each_rank_has_a_row_that_names_what_carries_its_messages(tmp_path):
    # the status doesn't matter: on one core it tells what is wrong there
    printed = forked(tmp_path, start, ["-m", "mpdemo", "env", "--site", "generic"], 2).stdout
    rows = rows_of(printed)
    assert [row[0] for row in rows] == ["0", "1"], printed
    assert rows[0][1:] == rows[1][1:] and rows[0][5:] == ["gloo", "lo"]
    assert printed.count("[OK]   Python") == 1


def one_of_two(rank, port) -> dict:
    """Return what a launcher tells one of two ranks."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def call_over_a_path_that_loses(size):
    """Each rank receives zeros where a message is that large: no error, as between two GPUs behind an IOMMU."""
    reduce = dist.all_reduce

    def lossy(message, *args):
        reduce(message, *args)
        if message.nbytes == size:
            message[len(message) // 2 :] = 0

    dist.all_reduce = lossy
    report = env.check_ranks("generic")
    print(*(report or []), sep="\n")


@pytest.mark.parametrize(("size", "wrong"), [(2**20, 1), (4, 0)])
def test_values_that_are_lost_on_the_way_are_found(tmp_path, size, wrong):
    held = held_port()
    port = held.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        runs = []
        for rank in range(2):
            (folder := tmp_path / f"{rank}").mkdir()
            call = forked, folder, call_over_a_path_that_loses, size
            runs.append(pool.submit(*call, timeout=120, TMPDIR=str(tmp_path), **one_of_two(rank, port)))
    said = runs[0].result().stdout
    for rank in range(2):
        line = (
            f"[FAIL] rank {rank} on {socket.gethostname()}: gloo all-reduce of 1024 KiB: 131,072 of 262,144"
        )
        assert said.count(line) == wrong, said
    assert said.count("remedy: NCCL_P2P_DISABLE=1") == 2 * wrong


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\t{0}\t{0}\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \t{0}\t{0}\tPXB\t0-31\t0\t\tN/A
GPU2\t{0}\t{0}\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\t{0}\t{0}\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X
"""


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TOPOLOGY.format("NV12"), "GPUs 2 and 3 talk over NVLink (all pairs)"),
        (
            TOPOLOGY.format("SYS"),
            "GPUs 1 and 3 talk over the link between CPU sockets (others are closer): expect",
        ),
        (TOPOLOGY.format("PHB"), "GPUs 1 and 3 talk over the host bridge (others are closer): expect"),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n", ""),
        ("", ""),
    ],
)
def test_what_connects_the_gpus_is_said_in_one_line(table, said):
    assert links.in_words(table).startswith(said) and bool(links.in_words(table)) == bool(said)


@pytest.mark.nightly
def test_a_rank_that_is_alone_sends_nothing(run_once):
    alone = run_once(*TORCHRUN, "1", "-m", "mpdemo", "env", "--site", "generic", timeout=200)
    assert alone.returncode == 0 and rows_of(alone.stdout)[0][5:] == ["-", "-"]  # nobody to talk to


@pytest.mark.nightly
def test_ranks_on_one_core_are_named_with_the_remedy():
    core = str(min(os.sched_getaffinity(0)))
    command = [
        "taskset",
        "-c",
        core,
        sys.executable,
        *TORCHRUN,
        "2",
        "-m",
        "mpdemo",
        "env",
        "--site",
        "generic",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (
        f"share 1 core(s): {core}\n       remedy: srun --cpus-per-task" in done.stdout
        and done.returncode != 0
    )


def call_the_roll():
    roll_call.PATIENCE = 3.0
    print(*env.check_ranks())


def test_a_rank_that_never_comes_ends_the_call_in_time(tmp_path):
    done = forked(tmp_path, call_the_roll, timeout=60, **one_of_two(0, 29655), TMPDIR=str(tmp_path))
    assert (
        done.stdout.startswith("[FAIL] the ranks do not meet: ") and "remedy: look for err" in done.stdout
    )


GPU = {"host": "n1", "cores": [0, 1, 2, 3], "visible": 4, "held": 4}
GPU |= {"backend": "nccl", "transport": "P2P"}
GPUS = [GPU | {"rank": rank, "uuid": f"gpu-{rank}"} for rank in range(4)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"uuid": "gpu-0"}, "ranks 0, 1, 2, 3 on n1 share 1 GPU(s)"),
        ({"held": 8}, "the job holds 8 GPUs on n1 and uses 4"),
        ({"uuid": "", "visible": 0}, "the job holds 4 GPUs on n1 and uses 0"),
        ({"visible": 1, "transport": "SHM"}, "the GPUs of n1 exchange data through its memory (SHM)"),
        ({"cores": [7]}, "ranks 0, 1, 2, 3 on n1 share 1 core(s): 7"),
        ({"transport": "NET/Socket"}, None),  # one node has no network
    ],
)
def test_what_is_wrong_on_a_node_with_gpus(change, said):
    found = what_is_wrong([row | change for row in GPUS])
    assert [what.startswith(said) for what, _ in found] == [True] if said else found == []


def test_gpus_that_are_left_over_count_only_where_a_job_may_ask_for_fewer(monkeypatch):
    assert what_is_wrong([row | {"held": 8} for row in GPUS], whole_nodes=True) == []
    # none is used
    assert what_is_wrong([row | {"uuid": "", "visible": 0} for row in GPUS], whole_nodes=True)
    monkeypatch.setattr(roll_call, "gpus_here", lambda: 4)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert roll_call.whereabouts(World())["held"] == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert roll_call.whereabouts(World())["held"] == 4


@pytest.mark.parametrize(("transport", "slow"), [("NET/IB", 0), ("NET/Socket", 1), ("eth0", 0)])
def test_nccl_over_tcp_is_named(transport, slow):
    rows = [row | {"host": f"n{row['rank']}", "held": 1, "transport": transport} for row in GPUS]
    assert [what.split(" (")[0] for what, _ in what_is_wrong(rows)] == [
        "NCCL uses TCP between the nodes"
    ] * slow


def test_nccl_names_its_transports(tmp_path):
    """In the words of NCCL 2.18 to 2.22."""
    (log := tmp_path / "nccl.txt").write_text(
        "n1:9:9 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [send] via NET/IB/3/GDRDMA\n"
        "n1:9:9 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM\n"
        "n1:9:9 [1] NCCL INFO Channel 01 : 0[1] -> 1[2] via SHM/direct/direct\n"
        "n1:9:9 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n"
        "n1:9:9 [0] NCCL INFO Using network Socket\n"
    )
    assert nccl_transports(log) == ["NET/IB", "NET/Socket", "P2P", "SHM"]
    assert nccl_transports(tmp_path / "none") == []


def test_cores_are_written_as_ranges():
    assert (ranges([5, 0, 1, 2]), ranges([3]), ranges([])) == ("0-2,5", "3", "")
    row = rows_of(table([GPUS[0] | {"peers": "1,2"}]))[0]
    assert row[3:] == ["1,2", "0-3", "nccl", "P2P"]

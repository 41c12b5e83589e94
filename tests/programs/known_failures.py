"""Cause the failures that take no time, and print their real messages: alone, then as two forked ranks.

python tests/programs/known_failures.py FOLDER
"""

import argparse
import os
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from mpdemo.world.family import held_port

SHORT = timedelta(seconds=2)


def alone(folder):
    """Yield a function for each failure of a single process."""
    busy = socket.create_server(("127.0.0.1", 0))
    port = busy.getsockname()[1]
    torch.save({"args": argparse.Namespace(lr=1)}, f"{folder}/object.pt")
    Path(folder, "short.pt").write_bytes(Path(folder, "object.pt").read_bytes()[:500])
    model = nn.Linear(1, 1)
    yield lambda: torch.load(f"{folder}/object.pt")
    yield lambda: torch.load(f"{folder}/short.pt")
    yield lambda: model.load_state_dict(
        {f"module.{name}": value for name, value in model.state_dict().items()}
    )
    yield lambda: dist.init_process_group("gloo")
    yield lambda: dist.all_reduce(torch.ones(1))
    yield lambda: dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=SHORT)
    yield lambda: dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=SHORT)
    yield lambda: DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0), shuffle=True)
    yield lambda: argparse.ArgumentParser().parse_args(["--local-rank=0"])


def together(rank):
    """Yield a function for each failure of two ranks that leaves the process group usable."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    detailed = dist.new_group(timeout=timedelta(seconds=60))
    dist.set_debug_level(dist.DebugLevel.OFF)
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    model = nn.Linear(2, 1)
    model.unused = nn.Parameter(torch.ones(1))
    ddp = DistributedDataParallel(model)
    yield lambda: dist.all_reduce(torch.ones(2 + rank), group=detailed)
    yield lambda: [ddp(torch.ones(1, 2)).sum().backward() for _ in range(2)]
    yield lambda: Schedule1F1B(stage, 1, loss_fn=nn.functional.mse_loss)
    places = {"target": torch.ones(2, 4)} if rank else {}
    yield lambda: ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss).step(
        *[torch.ones(2, 4)][rank:], **places
    )
    yield lambda: DistributedDataParallel(nn.Linear(1, 1), device_ids=[rank])
    yield lambda: nn.SyncBatchNorm(2)(torch.ones(4, 2))
    yield lambda: late(rank)


def late(rank):
    """Let rank 1 come too late to a barrier."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"])
        return "as it should be"
    try:
        dist.monitored_barrier(timeout=SHORT)
    finally:
        store.set("over", "1")


def tell(failures):
    """Call each function, and print its error as Python would."""
    for number, fail in enumerate(failures):
        try:
            if fail() != "as it should be":
                print(f"number {number} did not fail", flush=True)
        except (Exception, SystemExit) as error:
            print(f"{type(error).__name__}: {error}", flush=True)


def fork(folder, port):
    """Run two ranks that fail together; print what each wrote, one after the other: in one pipe lines may be torn."""
    children, logs = [], [Path(folder, f"rank{rank}.txt") for rank in range(2)]
    for rank, log in enumerate(logs):
        if not (child := os.fork()):
            try:
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
                os.dup2(1, 2)
                dist.init_process_group(
                    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
                )
                tell(together(rank))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    print(*(log.read_text() for log in logs), sep="", end="", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    held = held_port()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork(sys.argv[1], held.getsockname()[1])  # before this process has threads of its own
    tell(alone(sys.argv[1]))

"""What the course says of a default of PyTorch or Slurm is what the installed version does.

A failure names the sentence to correct. Left out are those of other libraries, and what a cell's own output shows.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from project import text_of
from torch import nn
from torch.distributed.distributed_c10d import _get_default_timeout
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.run import config_from_args, get_args_parser
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from mpdemo.tools.cluster import cluster

BOTH = "cpu:gloo,cuda:nccl"  # as the scripts to take home ask for


def option(function, name):
    """Return the default of an argument."""
    return inspect.signature(function).parameters[name].default


def minutes(backend):
    """Return the timeout of a process group."""
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("this build of PyTorch has no NCCL")
    return _get_default_timeout(backend).total_seconds() / 60


def ddp():
    """Return what DDP makes of a model without options."""
    return DistributedDataParallel(nn.Linear(1, 1))


def buckets():
    """Return how many MiB DDP's buckets hold: the first one, and each of the others."""
    return dist._DEFAULT_FIRST_BUCKET_BYTES / 2**20, ddp().bucket_bytes_cap / 2**20


def resharded():
    """Return whether a block's weights are shards again after its forward pass."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for module in (*net, net):
        fully_shard(module)
    net(torch.ones(1, 1))
    return isinstance(net[0].weight, DTensor)


def sampler(*names):
    """Return the defaults of some arguments of the sampler."""
    return tuple(option(DistributedSampler, name) for name in names)


def torchrun():
    """Return what torchrun makes of a command line without options."""
    return config_from_args(get_args_parser().parse_args(["train.py"]))[0]


def recorded():
    """Return how many calls the flight recorder keeps."""
    header = Path(torch.__file__).with_name("include") / "torch/csrc/distributed/c10d/FlightRecorder.hpp"
    return int(re.search(r'"TORCH_FR_BUFFER_SIZE",[^}]*}, (\d+)', header.read_text())[1])


FOUR = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
ROWS = [  # a page, what it says, the default that it means, and how the installed one is read
    ("10_two_devices", "It deals out sample 0 twice", (False,), lambda: sampler("drop_last")),
    ("20_processes", 'the ranks wait 10 minutes with `"nccl"`', 10, lambda: minutes("nccl")),
    ("20_processes", "and 30 minutes with any other", 30, lambda: minutes("gloo")),
    ("20_processes", 'also with `"cpu:gloo,cuda:nccl"`', 30, lambda: minutes(BOTH)),
    ("21_ddp_by_hand", "have about 25 MiB (the first one is smaller)", (1, 25), buckets),
    ("22_data", "Both ranks shuffle with the same seed", (True, 0), lambda: sampler("shuffle", "seed")),
    ("22_data", "DDP copies rank 0's buffers to all ranks", True, lambda: ddp().broadcast_buffers),
    (
        "30_two_stages",
        "`load_state_dict` refuses weights that belong to another stage",
        True,
        lambda: option(nn.Module.load_state_dict, "strict"),
    ),
    (
        "31_microbatches",
        "sets `scale_grads=False`, so the library doesn't divide",
        True,
        lambda: option(ScheduleGPipe, "scale_grads"),
    ),
    ("41_fsdp", "the default corresponds to ZeRO-3", True, resharded),
    (
        "47_long_sequence",
        "By default it gathers, and is a ring",
        "ALL_GATHER",
        lambda: _attention._cp_options.rotate_method.name,
    ),
    ("50_how_many", "buckets have 25 MiB", (1, 25), buckets),
    ("56_streams", "(2 by default)", 2, lambda: DataLoader([0], num_workers=1).prefetch_factor),
    (
        "53_time_limit",
        "replaces the default: SIGTERM, SIGINT, SIGHUP and SIGQUIT",
        FOUR,
        lambda: torchrun().signals_to_handle,
    ),
    ("53_time_limit", "waits 30 s for them, and kills", 30, lambda: torchrun().shutdown_timeout),
    ("60_crash", 'after 10 minutes with `"nccl"`', 10, lambda: minutes("nccl")),
    ("60_crash", "after 30 with any other", 30, lambda: minutes("gloo")),
    ("60_crash", 'also with `"cpu:gloo,cuda:nccl"`', 30, lambda: minutes(BOTH)),
    ("61_hang", "2000; with 0 no recorder", 2000, recorded),
    ("81_resume_submit", "by default not SIGUSR1", FOUR, lambda: torchrun().signals_to_handle),
    ("81_resume_submit", "gives its processes 30 seconds to end", 30, lambda: torchrun().shutdown_timeout),
]


def says(page) -> str:
    """Return what a notebook says, in one line."""
    return " ".join(text_of(page).split())


@pytest.mark.parametrize(
    ("page", "sentence", "wanted", "read"), ROWS, ids=[f"{row[0]}: {row[1]}" for row in ROWS]
)
def test_a_default_of_pytorch_is_what_the_course_says(
    page, sentence, wanted, read, monkeypatch, process_group
):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert sentence in says(page), f"{page} no longer says {sentence!r}: change this row, or delete it"
    found = read()
    assert found == wanted, f"PyTorch {torch.__version__} has {found}, but {page} says: {sentence}"


def test_slurms_kill_wait_is_what_the_course_says(slurm_programs, tmp_path, monkeypatch):
    assert "(`KillWait`, 30 s by default)" in says("53_time_limit")
    ours = cluster.SLURM_CONF.read_text()
    monkeypatch.setattr(cluster, "SLURM_CONF", Path(tmp_path, "slurm.conf"))
    cluster.SLURM_CONF.write_text(re.sub(r"^KillWait=.*\n", "", ours, flags=re.M))
    with cluster.Cluster.up(nodes=1) as box:
        assert re.search(r"^KillWait += 30 sec$", box.client("scontrol", "show", "config").stdout, re.M)

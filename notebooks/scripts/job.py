"""What surrounds every training run: device, process group, signals, log, speed and memory."""

import faulthandler
import logging
import os
import resource
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler

GPU = torch.accelerator.current_accelerator(check_available=True)  # None: train on the CPU
PEAK = 989e12 if GPU else 1e11  # operations per second: H100 in bf16, a CPU core. Look yours up
STOP = {signal.SIGTERM, signal.SIGUSR1}  # the second is sent by Slurm before the time limit
signals = []  # those that have come


def join():
    """Join the process group; return this process's device."""
    if "RANK" not in os.environ:
        sys.exit("RANK is not set: start this script with torchrun, as its first lines say")
    device = torch.device(GPU.type, int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.accelerator.set_device_index(device.index)
    backends = f"cpu:gloo,{GPU.type}:{dist.get_default_backend_for_device(GPU)}" if GPU else "gloo"
    dist.init_process_group(backends)  # gloo: for tensors on the CPU
    form = {"format": "[%(asctime)s] %(message)s", "datefmt": "%X", "stream": sys.stdout}
    logging.basicConfig(level="INFO", **form)
    logging.info(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}")  # look here first
    for number in STOP:
        signal.signal(number, lambda number, frame: signals.append(number))
    # Loader workers and compilers get it as well, and would die of it. Blocked here, before they start,
    # a signal stays pending in all of them, and agreed() looks whether one has come.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    faulthandler.register(signal.SIGUSR2)  # kill -USR2 PID prints what each thread is doing
    return device


def make_loader(dataset, batch, mesh, workers=0, **options):
    """Return a loader that gives each rank of a mesh its own part of each batch."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    assert batch % ranks == 0, f"a batch of {batch} cannot be divided by {ranks} processes"
    sampler = DistributedSampler(dataset, ranks, rank, **options)
    options = {"num_workers": workers, "pin_memory": GPU is not None, "drop_last": sampler.drop_last}
    return DataLoader(dataset, batch // ranks, sampler=sampler, **options)


def copy_from_rank_0(whole, sharded):
    """Copy a whole model, which only rank 0 has, into the shards of all ranks."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, whole.state_dict(), options=options)
    for name, buffer in sharded.named_buffers():  # no state dict has those with persistent=False
        if dist.get_rank() == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)


def agreed(count):
    """Return the sum of a count over all ranks, and whether a signal has come to any of them.

    A signal reaches each rank at another moment, and they must stop after the same step.
    """
    come = bool(signals or signal.sigpending() & STOP)
    both = torch.tensor([count, int(come)])  # on the CPU: no GPU is waited for
    dist.all_reduce(both)
    return both[0].item(), both[1].item() > 0


def newest(start):
    """Return the newest complete checkpoint START-NUMBER, or None; .metadata is written last."""
    complete = [file.parent for file in start.parent.glob(f"{start.name}-*/.metadata")]
    return max(complete, key=lambda folder: int(folder.name.split("-")[-1]), default=None)


def say(text):
    """Log a text on rank 0."""
    if dist.get_rank() == 0:
        logging.info(text)


def report(text, items, unit, seconds, operations):
    """Log a text with the speed, its fraction of the peak (MFU), and the peak memory of rank 0."""
    speed = items / seconds
    used = speed * operations / PEAK / dist.get_world_size()
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = (torch.accelerator.max_memory_allocated() if GPU else 1024 * kilobytes) / 2**20
    say(f"{text}, {speed:,.0f} {unit}/s, MFU {100 * used:.1f} %, peak {peak:,.0f} MiB")

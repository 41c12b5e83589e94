"""Counts the collectives that a script and PyTorch's wrappers call."""

import collections
import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as of_dtensors
import torch.distributed.tensor.parallel as tensor_parallel
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from .notes import note_once, now

calls = collections.Counter()  # since the last step
COLLECTIVES = "all_reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather all_gather_into_tensor"
COLLECTIVES += " all_gather_tensor all_gather_single broadcast reduce gather scatter all_to_all_single send recv"


def counted(function):
    """Count the calls of a collective."""

    @functools.wraps(function)
    def call(*args, **options):
        calls[function.__name__] += 1
        return function(*args, **options)

    return call


def watch():
    """Count the collectives called from Python; of DDP's own, note whether a backward pass has them."""
    for module in (dist, of_dtensors):
        for name in COLLECTIVES.split():
            if hasattr(module, name):
                setattr(module, name, counted(getattr(module, name)))
    build, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    parallelize = tensor_parallel.parallelize_module

    def built(self, *args, **options):
        note_once("wrapped", "DDP")
        build(self, *args, **options)

    def through(self, *args, **options):
        if torch.is_grad_enabled():
            now["synced"] = bool(self.require_backward_grad_sync)
        return forward(self, *args, **options)

    def split(module, device_mesh=None, *args, **options):
        if device_mesh is not None:
            note_once("tensor", tuple(device_mesh.mesh.flatten().tolist()))
        return parallelize(module, device_mesh, *args, **options)

    def spawn(*args, **options):
        note_once("spawn", "torch.multiprocessing")
        raise RuntimeError("this script starts its own processes")

    DistributedDataParallel.__init__, DistributedDataParallel.forward = built, through
    tensor_parallel.parallelize_module = split
    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = spawn

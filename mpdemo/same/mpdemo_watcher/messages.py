"""Counts the collectives that a script and PyTorch's wrappers call."""

import collections

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as of_dtensors
import torch.distributed.tensor.parallel as tensor_parallel
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from .notes import before, note_once, now

calls = collections.Counter()  # since the last step
COLLECTIVES = "all_reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather all_gather_into_tensor"
COLLECTIVES += " all_gather_tensor all_gather_single broadcast reduce gather scatter all_to_all_single send recv"


def watch():
    """Count the collectives called from Python; of DDP's own, note whether a backward pass has them."""
    for name in COLLECTIVES.split():
        for module in (dist, of_dtensors):
            before(module, name, lambda *_, name=name, **__: calls.update([name]))
    before(DistributedDataParallel, "__init__", lambda *_, **__: note_once("wrapped", "DDP"))
    before(DistributedDataParallel, "forward", forward)
    before(tensor_parallel, "parallelize_module", split)
    for name in ("spawn", "start_processes"):
        before(torch.multiprocessing, name, spawn)


def forward(model, *_, **__):
    """Note whether DDP averages in the backward pass that follows."""
    if torch.is_grad_enabled():
        now["synced"] = bool(model.require_backward_grad_sync)


def split(module, device_mesh=None, *_, **__):
    """Note which ranks share their samples."""
    if device_mesh is not None:
        note_once("tensor", tuple(device_mesh.mesh.flatten().tolist()))


def spawn(*_, **__):
    """End a script that starts its own processes."""
    note_once("spawn", "torch.multiprocessing")
    raise RuntimeError("this script starts its own processes")

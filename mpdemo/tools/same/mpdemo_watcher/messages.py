"""Sees every collective, whoever sends it, and every tensor that is written in place."""

import collections
import math
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel as tensor_parallel
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from . import sketch, state
from .notes import ORDER, before, calling, here, note_line, note_once, now
from .private_torch import DispatchMode, tensors_in

calls = collections.Counter()  # since the last step
SHARING = ("tp", "cp", "pp")  # parts of a layer, of a sequence, of the list of layers
ALIKE = ("allreduce", "all_reduce", "broadcast", "allgather")  # whose shapes must be the same in all ranks


class Messages(DispatchMode):
    """Sees what reaches PyTorch's dispatcher: the script's calls, and those of DDP, FSDP and DTensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        if "c10d" in function.namespace and ORDER["processes"] > 1:
            sent(name.strip("_"), args)
        found = function(*args, **(kwargs or {}))
        if name[-1] == "_" and not (now.inside or now.backward or now.stepping):
            state.wrote(args)
        return found


def sent(name, args):
    """Note a message; a collective before it is made, as the other ranks have to make it, too."""
    if name.startswith(("wait", "wrap")):
        return
    shapes = [list(tensor.shape) for tensor in tensors_in(args)]
    if not name.startswith(("send", "recv")):  # of which each rank makes its own
        calling(name, str(shapes[-1]) if shapes and name.startswith(ALIKE) else "")
    if not name.startswith("barrier"):  # not told in the table
        calls.update([name])
        now.sent = now.sent if now.backward or now.parts else here()


def watch():
    """See what wraps a model, and over which ranks it averages."""
    before(DistributedDataParallel, "__init__", wrapped)
    note_line(DistributedDataParallel, "no_sync", "no_sync")
    before(DistributedDataParallel, "forward", entered)
    note_line(DistributedDataParallel, "register_comm_hook", "hook")
    before(
        torch.distributed.fsdp,
        "fully_shard",
        lambda *_, mesh=None, **__: averages_over(mesh and mesh.size()),
    )
    before(tensor_parallel, "parallelize_module", split)
    for module in (device_mesh, dist):
        before(module, "init_device_mesh", arranged)
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, spawn)
    Messages().__enter__()  # to the end of this thread


def entered(*_, **__):
    """Note that this round goes through a wrapper."""
    now.entered |= torch.is_grad_enabled()


def wrapped(_, module=None, *__, process_group=None, device_mesh=None, **___):
    """Note DDP, what it averages, and over how many ranks."""
    note_once("wrapped", "DDP")
    note_once("wrapped at", here())
    for parameter in module.parameters() if module is not None else ():
        (sketch.wrapped if parameter.requires_grad else sketch.frozen).add(id(parameter))
    averages_over(process_group.size() if process_group else device_mesh and device_mesh.size())


def averages_over(size):
    """Note that a wrapper averages gradients over a part of the ranks only."""
    if size and size < ORDER["processes"]:
        note_once("part of the ranks", size)


def split(module, device_mesh=None, *_, **__):
    """Note which ranks share their samples."""
    if device_mesh is not None:
        note_once("shares", tuple(device_mesh.mesh.flatten().tolist()))
        note_once("wrapped", "tensor parallel")


def arranged(_, mesh_shape, *, mesh_dim_names=None, **__):
    """Note which ranks share their samples, by the names that such dimensions of a mesh have."""
    ranks = torch.arange(math.prod(mesh_shape)).view(*mesh_shape)
    for dim, name in enumerate(mesh_dim_names or ()):
        if name in SHARING and mesh_shape[dim] > 1:
            lines = ranks.movedim(dim, -1).reshape(-1, mesh_shape[dim]).tolist()
            note_once("shares", next((tuple(line) for line in lines if ORDER["rank"] in line), ()))


def spawn(fn, args=(), nprocs=1, join=True, **_):
    """Run here what the script would start in processes of its own: each of them is running already."""
    if nprocs != ORDER["processes"]:
        note_once("spawn", nprocs)
        raise RuntimeError(f"mp.spawn starts {nprocs} processes, not {ORDER['processes']}")
    begin = dist.init_process_group

    def init(backend=None, *_, init_method=None, store=None, **options):
        os.environ.update(ORDER["place"])  # the script may have chosen an address of its own
        return begin(backend, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init
    fn(int(os.environ["RANK"]), *args)
    return None if join else SimpleNamespace(join=lambda *_: True)

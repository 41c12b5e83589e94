"""Sees the collectives that a script and PyTorch's wrappers call, and runs what would start processes of its own."""

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

from . import rows, sketch
from .notes import ORDER, before, note_once, now
from .private_torch import of_dtensors
from .where import calling, here

calls = collections.Counter()  # since the last step
COLLECTIVES = "all_reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather all_gather_into_tensor"
COLLECTIVES += (
    " all_gather_tensor all_gather_single broadcast reduce gather scatter all_to_all_single send recv"
)
ALSO = "barrier monitored_barrier all_gather_object gather_object broadcast_object_list scatter_object_list all_to_all"

SHARING = ("tp", "cp", "pp")  # parts of a layer, of a sequence, of the list of layers


def watch():
    """Count the collectives called from Python; of DDP's own, note whether a backward pass has them."""
    for name in COLLECTIVES.split():
        for module in (dist, of_dtensors):
            before(module, name, counted(name))
    for name in ALSO.split():
        before(dist, name, lambda *_, name=name, **__: calling(name))
    before(DistributedDataParallel, "__init__", wrapped)
    before(DistributedDataParallel, "no_sync", lambda *_: note_once("no_sync", here()))
    before(DistributedDataParallel, "forward", forward)
    before(
        DistributedDataParallel,
        "register_comm_hook",
        lambda *_, **__: note_once("hook", "register_comm_hook"),
    )
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


def counted(name):
    """Count a collective, and note whether it cuts a tensor off from its gradient."""

    def count(*args, **_):
        calls.update([name])
        if name not in ("send", "recv"):
            calling(name, shape_of(args) if name in ("all_reduce", "broadcast", "all_gather") else "")
        for tensor in (arg for arg in args if isinstance(arg, torch.Tensor)):
            cut = tensor.requires_grad or "gather" in name and rows.is_made(tensor)
            if cut and torch.is_grad_enabled() and not now.backward:
                note_once("no gradient", name)
                note_once("cut at", here())

    return count


def shape_of(args) -> str:
    """Return the shape of the last tensor that a collective is given."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return str(list(tensors[-1].shape)) if tensors else ""


def wrapped(_, module=None, *__, process_group=None, device_mesh=None, **___):
    """Note DDP, what it averages, and over how many ranks."""
    note_once("wrapped", "DDP")
    note_once("wrapped at", here())
    calling("DistributedDataParallel")
    for parameter in module.parameters() if module is not None else ():
        (sketch.wrapped if parameter.requires_grad else sketch.frozen).add(id(parameter))
    averages_over(process_group.size() if process_group else device_mesh and device_mesh.size())


def averages_over(size):
    """Note that a wrapper averages gradients over a part of the ranks only."""
    if size and size < ORDER["processes"]:
        note_once("part of the ranks", size)


def forward(model, *_, **__):
    """Note whether DDP averages in the backward pass that follows."""
    if torch.is_grad_enabled():
        now.synced = bool(model.require_backward_grad_sync)


def split(module, device_mesh=None, *_, **__):
    """Note which ranks share their samples."""
    if device_mesh is not None:
        note_once("tensor", tuple(device_mesh.mesh.flatten().tolist()))


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
        os.environ.update(ORDER["address"])  # the script may have chosen an address of its own
        return begin(backend, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init
    fn(int(os.environ["RANK"]), *args)
    return None if join else SimpleNamespace(join=lambda *_: True)

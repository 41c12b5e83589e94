"""Values from all processes; a world of one needs no process group for it."""

import torch
import torch.distributed as dist


def sum_over_ranks(tensor):
    """Add up a tensor over all processes, in place; every process gets the sum. Nothing to do in a world of one."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def whole(tensor):
    """Return the whole of a tensor of which each process has a part (a DTensor), any other tensor as it is.

    Every process that has a part must call this, and receives all of it.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather_objects(value) -> list:
    """One value from each rank, in order of rank; every process gets the list."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def in_all(function, *arguments):
    """Call a function in every process and return its value; where one of them raises, all raise the same error.

    So all of them go on in the same way, and none waits for one that does not.
    """
    value = error = None
    try:
        value = function(*arguments)
    except Exception as raised:
        error = raised
    for raised in filter(None, gather_objects(error)):
        raise raised
    return value


def gather_in_first(value) -> list | None:
    """One value from each rank, in order of rank, in rank 0; None in the other ranks."""
    if not dist.is_initialized():
        return [value]
    first = dist.get_rank() == 0
    values = [None] * dist.get_world_size() if first else None
    dist.gather_object(None if first else value, values)  # its own is here already, and may be large
    return [value, *values[1:]] if first else None


def rest():
    """Wait for all ranks, over gloo: in NCCL's barrier a waiting rank would keep its GPU busy."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device="cpu"))

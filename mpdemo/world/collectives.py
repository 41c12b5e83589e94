"""What all processes find out or decide together; a world of one needs no process group for it."""

import torch
import torch.distributed as dist


def sum_over_ranks(tensor):
    """Add up a tensor over all processes, in place; every process gets the sum. Nothing to do in a world of one."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def whole(tensor):
    """Return the whole of a tensor of which each process has a part (a DTensor); every one of them must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather_objects(value) -> list:
    """One value from each rank, in order of rank; every process gets the list."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rest():
    """Wait for all ranks, over gloo: in NCCL's barrier a waiting rank would keep its GPU busy."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device="cpu"))

"""Values from all processes, in every process; a world of one needs no process group for it."""

import torch.distributed as dist


def sum_over_ranks(tensor):
    """Add up a tensor over all processes, in place; every process gets the sum. Nothing to do in a world of one."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather_objects(value) -> list:
    """One value from each rank, in order of rank; every process gets the list."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

"""How far the clocks of two ranks are apart, so that their timelines have one time axis."""

import time
from statistics import median

from mpdemo.world.machine import identity

CLOCK_ROUNDS = 9  # barriers by which two machines compare their clocks


def clock_offset(machine=None):
    """Return this process's ``perf_counter`` minus rank 0's, in seconds. All ranks must call it.

    Processes of one machine read the same clock: exactly 0. Between machines all ranks leave a barrier at nearly the
    same moment; the median of several is good to about the time of a barrier, 0.1 ms.

    Parameters
    ----------
    machine : str, optional
        What tells this machine from others; the identity of its last boot by default.
    """
    import torch.distributed as dist

    from mpdemo.world.collectives import gather_objects

    machines, offsets = gather_objects(machine or identity()), []
    for _ in range(CLOCK_ROUNDS if len(set(machines)) > 1 else 0):
        dist.barrier()
        now = gather_objects(time.perf_counter())
        offsets.append(now[dist.get_rank()] - now[0])
    if not offsets or machines[dist.get_rank()] == machines[0]:
        return 0.0
    return median(offsets)

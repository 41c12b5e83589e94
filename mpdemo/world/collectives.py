"""What all processes find out or decide together; a world of one needs no process group for it."""

import signal
import time

import torch
import torch.distributed as dist

INTERVAL = 5.0  # seconds between two checks of a `StopSignal` (or one call, where a step takes longer)


def place() -> tuple[int, int]:
    """Return this process's rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


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


class StopSignal:
    """Whether any rank got SIGUSR1, which Slurm sends before the time limit (``--signal=USR1@60``).

    All ranks must stop at the same point, after a step or a batch of a validation. They compare what they received
    every few seconds, at the latest after `most_calls` calls, since a comparison waits for the GPU.
    """

    def __init__(self, device, most_calls):
        self.device, self.most_calls = device, most_calls
        self.received, self.calls, self.next_check = False, 0, 1
        self.now = False  # what was found last
        self.last_check = 0, time.perf_counter() - INTERVAL  # call and time (s): the second call compares, too
        signal.signal(signal.SIGUSR1, self._receive)
        # Slurm signals loader workers and compilers, too: they inherit that it is blocked, and do not die of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def _receive(self, number, frame):
        self.received = True  # by a thread that is older than the block

    def seen(self) -> bool:
        """Return whether to stop now. Every rank must ask after each step or batch, and all get the same answer."""
        self.calls += 1
        if self.calls < self.next_check:
            return False
        now, (call, before) = time.perf_counter(), self.last_check
        self.received |= signal.sigtimedwait({signal.SIGUSR1}, 0) is not None
        flags = torch.tensor([float(self.received), (now - before) / (self.calls - call)], device=self.device)
        received, seconds = (sum_over_ranks(flags) / place()[1]).tolist()
        self.next_check = self.calls + min(max(1, int(INTERVAL / seconds)), self.most_calls)
        self.last_check = self.calls, now
        self.now = received > 0
        return self.now

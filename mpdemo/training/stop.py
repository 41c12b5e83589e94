"""SIGUSR1, which Slurm sends before the time limit (``--signal=USR1@60``): all ranks stop at the same point.

That is after a step of the training, or after a batch of a validation.
"""

import signal
import time

import torch
import torch.distributed as dist

from mpdemo.world.collectives import sum_over_ranks

INTERVAL = 5.0  # seconds between two checks over all ranks (or one call, where a step takes longer)


class StopSignal:
    """Whether any rank was asked to stop; all ranks compare at the latest after `most_calls` calls."""

    def __init__(self, device, most_calls):
        self.device, self.most_calls = device, most_calls
        self.received, self.calls, self.next_check = False, 0, 1
        self.last_check = None  # call and time (s)
        signal.signal(signal.SIGUSR1, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # held back since the start (world/launch.py)

    def _receive(self, number, frame):
        self.received = True

    def seen(self) -> bool:
        """Return whether to stop now. Every rank must ask after each step or batch, and all get the same answer."""
        self.calls += 1
        if self.calls < self.next_check:
            return False
        now, seconds = time.perf_counter(), INTERVAL
        if self.last_check:
            seconds = (now - self.last_check[1]) / (self.calls - self.last_check[0])
        flags = torch.tensor([float(self.received), seconds], device=self.device)  # reading it waits for a GPU
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        received, seconds = (sum_over_ranks(flags) / world_size).tolist()
        self.next_check = self.calls + min(max(1, int(INTERVAL / seconds)), self.most_calls)
        self.last_check = self.calls, now
        return received > 0

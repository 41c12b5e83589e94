"""SIGUSR1, which Slurm sends before the time limit (``--signal=USR1@60``): all ranks stop after the same step."""

import signal
import time

import torch

from mpdemo.world.collectives import sum_over_ranks

INTERVAL = 5.0  # seconds between two checks over all ranks (or one step, where that is longer)


class StopSignal:
    """Whether any rank was asked to stop.

    Parameters
    ----------
    world : World
    step : int
        Steps done so far.
    most_steps : int
        Steps between two checks at the most.
    """

    def __init__(self, world, step, most_steps):
        self.world, self.most_steps = world, most_steps
        self.received, self.next_check = False, step + 1
        self.last_check = None  # step and time (s)
        signal.signal(signal.SIGUSR1, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # held back since the start (world/launch.py)

    def _receive(self, number, frame):
        self.received = True

    def seen(self, step) -> bool:
        """Return whether to stop after this step; every rank must ask, and all get the same answer."""
        if step < self.next_check:
            return False
        now, seconds = time.perf_counter(), INTERVAL
        if self.last_check:
            seconds = (now - self.last_check[1]) / (step - self.last_check[0])
        flags = torch.tensor([float(self.received), seconds], device=self.world.device)  # reading it waits for a GPU
        received, seconds = (sum_over_ranks(flags) / self.world.world_size).tolist()
        self.next_check = step + min(max(1, int(INTERVAL / seconds)), self.most_steps)
        self.last_check = step, now
        return received > 0

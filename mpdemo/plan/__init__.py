"""Predict a pipeline before running it: schedules, their simulation, the cut of a model, its memory.

Importing this package loads no PyTorch, so a front end with little memory can simulate any pipeline; the functions
that look at a model's blocks (``mpdemo.plan.cost``, ``mpdemo.plan.memory``) load it when they are called.
"""

from mpdemo.plan import bubble
from mpdemo.plan.simulate import Simulation, simulate
from mpdemo.schedules import SCHEDULES, placement, usual_stages_per_rank

__all__ = [
    "SCHEDULES",
    "Simulation",
    "bubble",
    "placement",
    "simulate",
    "usual_stages_per_rank",
]

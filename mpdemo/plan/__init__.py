"""Predict a pipeline before running it: schedules, their simulation, the cut of a model, its memory.

Nothing here loads PyTorch on import, so a front end with little memory can simulate any pipeline; the functions
that look at a model's blocks (``mpdemo.plan.cost``, ``mpdemo.plan.memory``) load it when they are called.
"""

from mpdemo.plan import bounds
from mpdemo.plan.check import check_schedule
from mpdemo.plan.order import Op, rank_order
from mpdemo.plan.schedule import SCHEDULES, placement, stages_per_rank
from mpdemo.plan.simulate import Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Op",
    "Simulation",
    "bounds",
    "check_schedule",
    "placement",
    "rank_order",
    "simulate",
    "stages_per_rank",
]

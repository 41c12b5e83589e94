"""Predict a pipeline before running it: schedules, their simulation, the cut of a model, its memory.

Nothing here loads PyTorch on import, so a front end with little memory can simulate any pipeline; the functions
that look at a model's blocks (``mpdemo.plan.cost``, ``mpdemo.plan.memory``) load it when they are called.
"""

from mpdemo.plan import bubble
from mpdemo.plan.order import Op, rank_order
from mpdemo.plan.simulate import Simulation, simulate
from mpdemo.schedules import SCHEDULES, check_schedule, placement, usual_stages_per_rank

__all__ = [
    "SCHEDULES",
    "Op",
    "Simulation",
    "bubble",
    "check_schedule",
    "placement",
    "rank_order",
    "simulate",
    "usual_stages_per_rank",
]

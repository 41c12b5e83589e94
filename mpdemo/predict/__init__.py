"""Predict a training run before running it: schedules and their simulation, split points, memory and messages.

Importing this package loads no PyTorch; a function that asks it something loads it when it is called.
"""

from mpdemo.predict.simulate import Simulation, simulate
from mpdemo.settings.schedules import SCHEDULES, usual_stages_per_rank

__all__ = ["SCHEDULES", "Simulation", "simulate", "usual_stages_per_rank"]

"""Run a strategy's program under torchrun, but one rank fails in its third step.

failing.py RANK raise|kill STRATEGY OPTIONS
"""

import itertools
import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

rank, how, rung, *options = sys.argv[1:]
steps = itertools.count(1)


def fail(*_):
    """In an optimizer's step: fail in the third."""
    if next(steps) == 3:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the digits are upside down")


if os.environ["RANK"] == rank:
    register_optimizer_step_pre_hook(fail)
sys.argv[1:] = options
runpy.run_module(f"mpdemo.rungs.{rung}", run_name="__main__")

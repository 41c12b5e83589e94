"""Train like ``python -m mpdemo train``, but one rank fails in its third step.

failing.py RANK raise|kill TRAIN-ARGUMENTS
"""

import itertools
import os
import signal
import sys

from mpdemo.__main__ import main
from mpdemo.world.launch import start

rank, how, *words = sys.argv[1:]
steps = itertools.count(1)


def fail(*_):
    """In an optimizer's step: fail in the third."""
    if next(steps) == 3:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the digits are upside down")


if "RANK" not in os.environ:
    sys.exit(start([__file__, *sys.argv[1:]], int(words[words.index("--processes") + 1])))
if os.environ["RANK"] == rank:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(fail)
sys.exit(main(["train", *words]))

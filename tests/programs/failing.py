"""Train like ``python -m mpdemo train``, but one rank fails in its third step.

failing.py RANK raise|kill TRAIN-ARGUMENTS
"""

import os
import signal
import sys

from mpdemo.__main__ import main
from mpdemo.world.launch import start

rank, how, *words = sys.argv[1:]


def fail_in_step(number):
    """Let step `number` of any optimizer fail."""
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == number:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the digits are upside down")

    register_optimizer_step_pre_hook(fail)


if "RANK" not in os.environ:
    sys.exit(start([__file__, *sys.argv[1:]], int(words[words.index("--processes") + 1])))
if os.environ["RANK"] == rank:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    fail_in_step(3)
sys.exit(main(["train", *words]))

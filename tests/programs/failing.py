"""Train like ``python -m mpdemo train``, but one rank fails in its third step.

failing.py RANK raise|kill TRAIN-ARGUMENTS
"""

import os
import signal
import sys

from mpdemo.__main__ import main
from mpdemo.world.launch import start

rank, how, *words = sys.argv[1:]


def fail_in_step(step, number):
    """Wrap a rung's step so that call `number` fails."""
    calls = []

    def failing(*args):
        calls.append(1)
        if len(calls) == number:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the digits are upside down")
        return step(*args)

    return failing


if "RANK" not in os.environ:
    sys.exit(start([__file__, *sys.argv[1:]], int(words[words.index("--processes") + 1])))
if os.environ["RANK"] == rank:
    from mpdemo import parallel

    make = parallel.make

    def make_failing(*args):
        rung = make(*args)
        rung.step = fail_in_step(rung.step, 3)
        return rung

    parallel.make = make_failing
sys.exit(main(["train", *words]))

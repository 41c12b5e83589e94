"""Run programs of this folder, each in several processes that share one import of PyTorch.

forked.py FILE: a JSON list of [processes, program, argument, ...], which are run one after the other.
"""

import json
import sys

import torchvision  # noqa: F401

import mpdemo.measure.trial
import mpdemo.rungs.hybrid
import mpdemo.rungs.tensor  # noqa: F401
from mpdemo.world.launch import start

with open(sys.argv[1]) as file:
    for processes, program, *arguments in json.load(file):
        if start([program, *arguments], processes):
            sys.exit(f"{program} failed in {processes} processes")

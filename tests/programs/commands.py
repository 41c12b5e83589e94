"""Start strategies' programs, each in a process of its own that finds PyTorch imported already.

commands.py FILE: a JSON list of {"words", "environment"}; writes [status, stdout, stderr] of each to FILE.results.
"""

import json
import os
import runpy
import sys
import tempfile

import torchvision  # noqa: F401

import mpdemo.run
import mpdemo.training.stages  # noqa: F401


def run(words, environment):
    """Fork, run and wait; importing PyTorch has started no thread that a fork could lose."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            os.environ.update(environment)
            rung, *sys.argv[1:] = words
            runpy.run_module(f"mpdemo.rungs.{rung}", run_name="__main__")
            os._exit(99)  # it should have ended by itself
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [file.seek(0) or file.read().decode() for file in (stdout, stderr)]
    return [status, *texts]


with open(sys.argv[1]) as file:
    results = [run(**case) for case in json.load(file)]
with open(sys.argv[1] + ".results", "w") as file:
    json.dump(results, file)

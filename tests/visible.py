"""All tests compute on the CPU, except those of tests/gpu, whose processes see the GPUs."""

import os

from mpdemo.world.devices import ON_THE_CPU, gpus_here

# xdist's workers inherit it
os.environ.setdefault("GPUS_BEFORE_TESTS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


def show_gpus():
    """Let child processes see the GPUs that could be seen before the tests began."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if os.environ["GPUS_BEFORE_TESTS"] != "all":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["GPUS_BEFORE_TESTS"]


def hide_gpus():
    """Let child processes see none; how many there are is counted before, once."""
    show_gpus()
    gpus_here()
    os.environ |= ON_THE_CPU

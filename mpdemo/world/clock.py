"""One clock for a device: the host's time on a CPU, events in the device's queue of work on a GPU.

Kernels run after the call that launches them has returned. So the host's time around a call measures the launch; an
event is passed when the GPU has done all the work queued before it.
Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html.
"""

import time

import torch


def read(device):
    """Return the time now: seconds of ``time.perf_counter`` on a CPU, an event on the current stream on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin, end) -> float:
    """Return the seconds between two readings; waits until the GPU has passed the second one."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000  # elapsed_time gives milliseconds


def wait(device):
    """Wait until the device has done all that was launched; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device) -> float:
    """Return the host's time in seconds once the device has done all that was launched."""
    wait(device)
    return time.perf_counter()

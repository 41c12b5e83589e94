"""PyTorch's flight recorder: every rank remembers its last collectives, also those that never ended.

Where a hang has no message, it names the call in which each rank waits. Taught in notebooks/11_when_it_breaks.ipynb.
Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
"""

import json


def last_collective() -> str:
    """Return this rank's last collective: its number in its process group, its name, the sizes of its tensors.

    The number counts the collectives of a process group from 1 on. Two ranks that are at the same number with another
    name, or other sizes, wait for each other.
    """
    from torch._C._distributed_c10d import _dump_fr_trace_json  # not public yet, like the rest of the recorder

    entries = json.loads(_dump_fr_trace_json()).get("entries")
    if not entries:
        return "this PyTorch recorded no collective"
    last = entries[-1]
    return f"number {last['collective_seq_id']}: {last['profiling_name']} of {last['input_sizes']}"

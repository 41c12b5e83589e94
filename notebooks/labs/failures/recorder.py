"""The flight recorder of gloo's ranks, written as NCCL's ranks write theirs, and what stands in it.

    write_recorder(folder)     in each rank: its last collectives, as folder/rank_N
    calls_in(folder)           of each rank: what it called, and in which function, by number
    stack_in(folder, rank)     the stack that faulthandler has written as folder/stack_N, the innermost call first

Taught in notebooks/61_hang.ipynb.
"""

import pickle
import re
from pathlib import Path

import torch.distributed as dist

from mpdemo.labs.on_call.clues import readable
from mpdemo.paths import root

FRAME = re.compile(r'  File ".*?([^/"]+)", line (\d+) in (\w+|<module>)')
OF_TORCH = "distributed_c10d.py", "c10d_logger.py"


def write_recorder(folder):
    """Write this rank's flight recorder, where torchfrtrace finds it."""
    from torch._C._distributed_c10d import _dump_fr_trace  # noqa: PLC0415 - the reader of a folder needs no such torch

    dump = readable(pickle.loads(_dump_fr_trace(True, True)))
    dump["pg_config"]["0"]["ranks"] = str([*range(dist.get_world_size())])
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"rank_{dist.get_rank()}").write_bytes(pickle.dumps(dump))


def calls_in(folder) -> dict:
    """Return for each rank the collectives that it called, by number: kind, and the function that called it."""
    calls = {}
    for file in sorted(Path(root(), folder).glob("rank_*")):
        entries = pickle.loads(file.read_bytes())["entries"]
        calls[file.name.replace("_", " ")] = {entry["collective_seq_id"]: _call(entry) for entry in entries}
    return calls


def _call(entry):
    names = [frame["name"] for frame in entry["frames"] if not frame["filename"].endswith(OF_TORCH)]
    return f"{entry['profiling_name'].partition(':')[2]}\nin {names[0]}"


def stack_in(folder, rank) -> str:
    """Return a rank's stack, from the innermost call to `main`: function, file and line, without PyTorch's wrapper."""
    frames = FRAME.findall(Path(root(), folder, f"stack_{rank}").read_text())
    own = frames[: [name for _, _, name in frames].index("main") + 1]  # who has started it doesn't matter
    return " < ".join(f"{name} ({file}:{line})" for file, line, name in own if file != "c10d_logger.py")

"""Run under torchrun: damage the newest of the sharded checkpoints of two runs, and resume from what is left.

damaged.py OLDER NEWER FOLDER: both checkpoints are put together in FOLDER; every rank notes the step that it reads.
"""

import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from mpdemo.training.checkpoint import read_newest
from mpdemo.trial import join_world


def put_together(older, newer, folder):
    """Copy the checkpoints, and change a byte in the last file of the newer one."""
    for run in (older, newer):
        shutil.copytree(Path(run, "checkpoints"), folder / "checkpoints", dirs_exist_ok=True)
    *_, last = sorted((folder / "checkpoints").glob("*/*.safetensors"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)


if __name__ == "__main__":
    folder = Path(sys.argv[3])
    with join_world() as world:
        if world.rank == 0:
            put_together(*sys.argv[1:3], folder)
        dist.barrier()
        state = read_newest(folder)
        (folder / f"rank-{world.rank}").write_text(str(state["step"]))

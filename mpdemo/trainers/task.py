"""What each process of a rehearsed job runs: rank 0 says what it has, then all run the job's own command.

    python -m mpdemo.trainers.task -m mpdemo train --rung single --steps 2

The lines go into the job's log, where `mpdemo.trainers.rehearse` reads them.
"""

import json
import os
import platform
import runpy
import sys

MARK = "rehearsal: "  # before the line in the job's log


def main(words):
    """Print what there is, then run `words` as ``python`` would."""
    say({"python": platform.python_version()})  # at once: a PyTorch that does not load ends the job
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    say({"torch": torch.__version__, "gpus": torch.cuda.device_count(), "nccl": nccl})
    sys.argv = words[1:] if words[0] == "-m" else words
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")


def say(facts):
    """Print facts as one line, on rank 0."""
    if int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0:
        print(MARK + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

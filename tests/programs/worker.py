"""A job's process that behaves as told, for the tests of jobs; needs no PyTorch.

worker.py OUT                  write metrics and a summary, as a training run does
worker.py OUT fail RANK CODE   that rank prints an error and exits with CODE; the others wait for it
worker.py OUT sleep            start a child of its own, then sleep; on SIGUSR1 exit with status 3
worker.py OUT echo WORDS       rank 0 writes its arguments to OUT/echo.json
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

out, action, *rest = [*sys.argv[1:], "train"][:2] + sys.argv[3:]
rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
world = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
folder = pathlib.Path(out)
print(f"rank {rank} of {world} on {os.uname().nodename}", flush=True)

if action == "fail":
    if rank == int(rest[0]):
        print("all was well until here", flush=True)
        print("ValueError: the digits are upside down", file=sys.stderr, flush=True)
        sys.exit(int(rest[1]))
    time.sleep(60)
elif action == "sleep":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    (folder / f"pids-{rank}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(120)
elif action == "echo" and rank == 0:
    (folder / "echo.json").write_text(json.dumps(rest))
elif action == "train" and rank == 0:
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in range(1, 4):
            metrics.write(json.dumps({"event": "step", "step": step, "loss": 1 / step}) + "\n")
    (folder / "summary.json").write_text(json.dumps({"final_loss": 1 / 3, "processes": world}))

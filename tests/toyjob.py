"""A job of about a second for the tests of the live view: a process that is its own supervisor.

python tests/toyjob.py OUT STEPS SECONDS_PER_STEP [EXIT_STATUS]
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

from mpdemo.jobs import Job
from mpdemo.jobs.local_job import HERE, LOG, STATUS
from mpdemo.world.processes import be_killed_with_parent, start_time


class ToyJob(Job):
    """A job whose process writes metrics, a log and how it ended."""

    def __init__(self, out, steps=20, pause=0.05, status=0):
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, str(out), str(steps), str(pause), str(status)]
        with open(out / LOG, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            # as a real job: an interrupt of the kernel does not reach it, and it ends with the kernel
            apart = {"start_new_session": True, "preexec_fn": be_killed_with_parent}
            self.process = subprocess.Popen(command, **streams, **apart)
        record = {
            "id": self.process.pid,
            "started": start_time(self.process.pid),
            "where": HERE,
            "scratch": "",
        }
        super().__init__(
            record | {"spec": {"name": "toy"}, "script": "none", "submitted": time.time()}, out
        )


def main(out, steps, pause, status):
    """Write what a training run writes, one step per `pause` seconds, and what its supervisor would write."""
    with open(Path(out) / "metrics.jsonl", "w", buffering=1) as file:
        for step in range(1, int(steps) + 1):
            time.sleep(float(pause))
            loss = 2.3 * math.exp(-step / 20) + 0.02 * math.sin(step)
            row = {
                "event": "step",
                "step": step,
                "steps": int(steps),
                "loss": loss,
                "images_per_second": 128.0,
            }
            file.write(json.dumps(row) + "\n")
            print(f"\rtoy: {step}/{steps}", end="", flush=True)
    print("\nthe last line", flush=True)
    end = {"how": "ended", "exit_status": int(status), "run_time": float(pause) * int(steps)}
    part = Path(out, "part")
    part.write_text(json.dumps(end))
    part.replace(Path(out, STATUS))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A job of about a second with the interface of the package's jobs, for the tests of the live view.

python tests/toyjob.py OUT STEPS SECONDS_PER_STEP [EXIT_STATUS]
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path


class ToyJob:
    """A child process that writes metrics and a log, and can be cancelled."""

    where, queue, name = "this machine", None, "toy"

    def __init__(self, out, steps=20, pause=0.05, status=0):
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.begin, self.cancelled = time.time(), False
        command = [sys.executable, __file__, str(out), str(steps), str(pause), str(status)]
        with open(self.out / "log.txt", "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self.id = self.process.pid

    @property
    def finished(self):
        return self.process.poll() is not None

    @property
    def state(self):
        if not self.finished:
            return "running"
        return "cancelled" if self.cancelled else "failed" if self.process.returncode else "done"

    @property
    def reason(self):
        return "exit status 3" if self.state == "failed" else ""

    @property
    def run_time(self):
        return time.time() - self.begin

    def log(self):
        return (self.out / "log.txt").read_bytes().decode()  # keeps the carriage returns

    def metrics(self):
        file = self.out / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def cancel(self):
        self.cancelled = True
        self.process.terminate()


def main(out, steps, pause, status):
    """Write what a training writes, one step per `pause` seconds."""
    with open(Path(out) / "metrics.jsonl", "w", buffering=1) as file:
        for step in range(1, int(steps) + 1):
            time.sleep(float(pause))
            loss = 2.3 * math.exp(-step / 20) + 0.02 * math.sin(step)
            row = {"event": "step", "step": step, "steps": int(steps), "loss": loss, "images_per_second": 128.0}
            file.write(json.dumps(row) + "\n")
            print(f"\rtoy: {step}/{steps}", end="", flush=True)
    print("\nthe last line", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

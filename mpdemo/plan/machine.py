"""What the devices of this machine take, measured by processes of their own: for ``plan --cost measure``.

There is a process on each device, where so many are here: devices that compute at the same time may share their
memory's speed. Taught in notebooks/11_which_one.ipynb.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mpdemo.errors import RunFailed, UserError
from mpdemo.plan.cost import BlockCost, bandwidth
from mpdemo.world.devices import gpus_here
from mpdemo.world.launch import lost_a_peer
from mpdemo.world.processes import be_killed_with_parent, child_environment, room

QUESTION = ("model", "input", "tokens", "image_size", "classes", "channels", "norm", "optimizer", "budget")
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: )?(?:[\w]+\.)*(\w+(?:Error|Exception): .+)$", re.MULTILINE)
PATIENCE = 600.0  # seconds beyond the budget after which the measuring is ended


@dataclass(frozen=True)
class Machine:
    """What was measured on so many devices at once; with one there is no message.

    Attributes
    ----------
    devices : int
    costs : dict
        Samples of a microbatch -> list of BlockCost, one per block.
    update : float
        Seconds of the optimizer's step for each byte of weights.
    latency, per_byte : float
        Seconds of a message from one device to another, and more for each byte of it.
    """

    devices: int
    costs: dict
    update: float
    latency: float = 0.0
    per_byte: float = 0.0

    def speeds(self) -> dict:
        """Return what a `mpdemo.plan.planner.Workload` takes of it."""
        measured = {"bandwidth": bandwidth(self.per_byte)} if self.per_byte > 0 else {}
        return {"costs": self.costs, "update": self.update, "latency": self.latency} | measured


def devices_here() -> int:
    """Return how many devices this machine has: GPUs, or else CPU cores with memory for a process on each."""
    return gpus_here() or room()[-1]


def require_devices(devices):
    """Refuse more devices than this machine has."""
    if devices > (here := devices_here()):
        raise UserError(
            f"--cost measure --devices {devices}: this machine has {here}; allowed: --devices {here}, or a data sheet "
            "such as --cost v100"
        )


def memory_per_device(devices) -> float:
    """Return the bytes that each of so many CPU cores may take of this machine's free memory; GPUs have their own."""
    return float("inf") if gpus_here() else psutil.virtual_memory().available / devices


def measured(request, sizes, devices) -> Machine:
    """Measure blocks, update and messages on so many devices of this machine at once, or on one where it has fewer.

    `request` names a model of the course, or the reader's own; `sizes` are samples of a microbatch.
    """
    devices = devices if devices <= devices_here() else 1
    result = ask(request, devices, sizes=sorted(set(sizes)))
    costs = {int(size): [BlockCost(*block) for block in blocks] for size, blocks in result.pop("costs").items()}
    return Machine(costs=costs, **result)


def step_seconds(request, settings) -> list:
    """Return the median seconds of a few steps of each training on this machine's devices; None beyond the budget."""
    return ask(request, request.devices, settings=[asdict(s) for s in settings])["seconds"]


def cause(stderr) -> str:
    """Return the error of the rank that failed by itself, as it stands under its traceback, or what ended it."""
    errors = [error for error in ERROR_LINE.findall(stderr) if not lost_a_peer(error)]
    return (errors or [line for line in stderr.splitlines() if line.startswith("mpdemo: ")] or ["no message"])[0]


def ask(request, devices, **question) -> dict:
    """Measure in so many processes on this machine; a refusal of theirs, or a failure, is one line of ours."""
    question = {name: getattr(request, name) for name in QUESTION} | question
    limit = request.budget + PATIENCE
    with tempfile.TemporaryDirectory(prefix="mpdemo-plan-") as folder:
        Path(folder, "question.json").write_text(json.dumps(question))
        command = [sys.executable, "-m", "mpdemo.world.launch", str(devices), "-m", "mpdemo.plan.measure", folder]
        options = {"env": child_environment() | {"TMPDIR": folder}, "preexec_fn": be_killed_with_parent}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, **options)
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"--cost measure did not end within {limit:.0f} s; try a smaller --batch, or --cost v100"
            ) from None
        if done.returncode:
            message = cause(done.stderr)
            if message.startswith("UserError: "):
                raise UserError(message.removeprefix("UserError: "))
            raise RunFailed(f"--cost measure failed: {message}; --cost v100 needs no measuring")
        return json.loads(Path(folder, "summary.json").read_text())

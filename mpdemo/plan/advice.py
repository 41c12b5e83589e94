"""Which rung to use on so many devices, and what every other one would take: ``python -m mpdemo plan --devices``.

Taught in notebooks/11_which_one.ipynb.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from mpdemo.errors import RunFailed, UserError
from mpdemo.options import as_arguments
from mpdemo.plan import strategies
from mpdemo.plan.case import Case, on_one
from mpdemo.plan.choose import choose
from mpdemo.plan.footprint import ROOFS
from mpdemo.plan.strategies import ONE_DEVICE
from mpdemo.plan.subject import MIB, RESERVE, settled
from mpdemo.world.devices import gpus_here
from mpdemo.world.processes import be_killed_with_parent, child_environment, room

QUESTION = ("model", "input", "tokens", "classes", "channels", "budget")  # of measure.py
PATIENCE = 600.0  # seconds beyond the budget after which the measuring is ended


def answer(request) -> tuple:
    """Return what to use on ``--devices``, why, a table of all and the commands, as text; and the rows of the table."""
    measuring = request.cost == "measure"
    if measuring and request.devices > (here := devices_here()):
        raise UserError(
            f"--cost measure --devices {request.devices}: this machine has {here}; allowed: --devices {here}, or a "
            "data sheet such as --cost v100"
        )
    case = case_of(request, request.devices)
    choice = choose(case)  # refuses what no device can do, before minutes are spent on measuring
    rows = strategies.compare(case)
    seconds = measure(request, case, rows) if measuring else {}
    lines = [f"{choice.answer}: {choice.why}", "", strategies.table(case, rows, seconds)]
    if measuring and not seconds:
        lines += ["(--cost measure: no step could be measured within this machine's memory and the --budget)"]
    times = f"times estimated for the {case.gpu}, no communication hidden"
    if seconds:
        here = f"{case.devices} {'GPU' if gpus_here() else 'CPU core'}{'s' * (case.devices > 1)} of this machine"
        times = f"steps of each strategy measured on {here}"
    lines += [f"({times}; memory without CUDA's {RESERVE // MIB} MiB)"]
    if uncut := getattr(case.model, "uncut", ""):
        lines += [f"no pipeline: the model is planned as one block, since {uncut}"]
    lines += [f"note: {note}" for note in getattr(case.model, "notes", [])]
    text = "\n".join([*lines, "", commands(request, [row for row in rows if row.fits])]).rstrip()
    return text, [strategies.as_row(case, row, seconds) for row in rows]


def case_of(request, devices) -> Case:
    """Return what a request asks for so many devices."""
    model = request.model
    if request.own_model:
        from mpdemo.models.own import OwnModel

        model = OwnModel.wanted(request)
    names = ("batch", "nodes", "optimizer", "image_size", "classes", "channels", "norm")
    options = {name: getattr(request, name) for name in names}
    sheet = request.cost if request.cost in ROOFS else "a100"
    memory = float("inf") if request.gpu_memory is None else request.gpu_memory
    return Case(model, devices=devices, memory=memory, gpu=sheet, **options)


def commands(request, rows) -> str:
    """Return the lines that say how to train some strategies."""
    if request.own_model:
        return "to train your own model: notebooks/scripts/train_ddp.py is a whole script, in plain PyTorch"
    lines = []
    for row in rows:
        settings = {"model": request.model, "rung": row.rung}
        settings |= {"optimizer": "adamw"} if request.optimizer == "adamw" else {}
        settings |= {"norm": request.norm} if request.norm != "batch" else {}
        settings |= {"batch_size": request.batch, "image_size": request.image_size} | row.predicted.settings
        lines.append(f"{row.answer}:\n  python -m mpdemo train {' '.join(as_arguments(settings))}")
    return "\n".join(lines)


def measure(request, case, rows) -> dict:
    """Return the measured seconds of a step of each strategy, and of one device, by answer; {} where all are None.

    One is None where the strategy does not fit or leaves devices idle, where a device of this machine cannot hold it
    beside the model it is made from, and where ``--budget`` was spent before.
    """
    free = memory_per_device(case.devices) - sum(block.weights for block in case.blocks())
    alone = on_one(replace(case, devices=1), case.batch, 1).peak
    wanted = {row.answer: _settings(case, row.rung, **row.predicted.settings)
              for row in rows if row.fits and row.predicted.memory <= free
              and row.predicted.settings.get("processes", 1) == case.devices}  # fmt: skip
    wanted |= {ONE_DEVICE: _settings(case, "single")} if alone <= min(free, case.limit) else {}
    different = list(dict.fromkeys(wanted.values()))  # strategies may ask for the same
    seconds = dict(zip(different, measured_steps(request, different), strict=True)) if different else {}
    found = {answer: seconds.get(wanted.get(answer)) for answer in (*(row.answer for row in rows), ONE_DEVICE)}
    return found if any(found.values()) else {}


def _settings(case, rung, processes=1, replicas=None, **more):
    """Return the complete settings of a step of a strategy."""
    more |= {"norm": case.norm, "optimizer": "adamw" if case.optimizer == "adamw" else "sgd"}
    return settled(case.subject, rung, case.batch, processes // (replicas or 1), replicas, **more)


def devices_here() -> int:
    """Return how many devices this machine has: GPUs, or else CPU cores with memory for a process on each."""
    return gpus_here() or room()[-1]


def memory_per_device(devices) -> float:
    """Return the bytes that each of so many CPU cores may take of this machine's free memory; GPUs have their own."""
    return float("inf") if gpus_here() else psutil.virtual_memory().available / devices


def measured_steps(request, settings) -> list:
    """Return the median seconds of a few steps of each training on this machine's devices; None beyond the budget.

    A refusal of the processes that measure, or a failure, is one line of ours.
    """
    question = {name: getattr(request, name) for name in QUESTION} | {"settings": [asdict(s) for s in settings]}
    limit = request.budget + PATIENCE
    with tempfile.TemporaryDirectory(prefix="mpdemo-plan-") as folder:
        Path(folder, "question.json").write_text(json.dumps(question))
        launch = [sys.executable, "-m", "mpdemo.world.launch", str(request.devices)]
        options = {"env": child_environment() | {"TMPDIR": folder}, "preexec_fn": be_killed_with_parent}
        try:
            done = subprocess.run(
                [*launch, "-m", "mpdemo.plan.measure", folder], capture_output=True, text=True, timeout=limit, **options
            )
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"--cost measure did not end within {limit:.0f} s; try a smaller --batch, or --cost v100"
            ) from None
        if done.returncode:
            line = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("mpdemo: ")), "")
            if done.returncode == UserError.status:
                raise UserError(line.removeprefix("mpdemo: error: "))
            raise RunFailed(f"--cost measure failed: {line.removeprefix('mpdemo: ')}; --cost v100 needs no measuring")
        return json.loads(Path(folder, "summary.json").read_text())

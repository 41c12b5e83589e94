"""Measure what the plan needs of the devices of this machine: `mpdemo.plan.machine.Machine`.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.machine FOLDER

It reads ``question.json`` in the folder, and rank 0 writes ``summary.json`` there. ``python -m mpdemo plan`` starts it.
"""

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mpdemo import models
from mpdemo.errors import UserError, error_line
from mpdemo.labs.harness import rest, write_result
from mpdemo.models.own import OwnModel
from mpdemo.plan import cost
from mpdemo.plan.machine import Machine
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

SHORT, LONG = 16 * 2**10, 8 * 2**20  # bytes of the two messages through which a line is laid
REPEATS = 9
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}  # by their names in mpdemo.plan.memory.STATES


def measure(world, by_size, sample, optimizer, budget=60.0) -> Machine:
    """Measure in all ranks at the same time; of blocks, the slowest rank's costs. All ranks must call this.

    Parameters
    ----------
    by_size, sample, budget
        As `models` and so on for `mpdemo.plan.cost.measure`.
    optimizer : str
        A key of `mpdemo.plan.memory.STATES`.
    """
    by_size = {size: model.to(world.device) for size, model in by_size.items()}
    rest()
    costs = slowest(cost.measure(by_size, sample.to(world.device), budget=budget))
    return machine_of(world, costs, by_size[min(by_size)], optimizer)


def slowest(costs) -> dict:
    """Return for each size the costs on the rank where they were largest, from all ranks' own."""
    ranks = gather_objects(costs)
    return {size: max((rank[size] for rank in ranks), key=cost.total) for size in costs}


def machine_of(world, costs, model, optimizer) -> Machine:
    """Measure the messages and a model's update; return the `Machine` with them and the costs."""
    latency, per_byte = message(world)
    return Machine(world.world_size, costs, update(world, model, optimizer), latency, per_byte)


def update(world, model, optimizer) -> float:
    """Return the seconds of the optimizer's step for each byte of weights. The model keeps gradients of zeros."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step = OPTIMIZERS[optimizer](parameters, lr=1e-6).step
    return timed(world, step) / sum(parameter.nbytes for parameter in parameters)


def message(world) -> tuple[float, float]:
    """Return the seconds of a short message from one device to another, and those of each further byte.

    A world of one sends none: zeros.
    """
    if world.world_size == 1:
        return 0.0, 0.0
    tensors = [torch.zeros(size // 4, device=world.device) for size in (SHORT, LONG)]
    short, long = (timed(world, partial(there_and_back, world, tensor)) / 2 for tensor in tensors)
    per_byte = max(0.0, (long - short) / (LONG - SHORT))
    return max(0.0, short - SHORT * per_byte), per_byte


def there_and_back(world, tensor):
    """Send from rank 0 to rank 1, and back; the others rest."""
    for sender in (0, 1) if world.rank < 2 else ():
        (dist.send if world.rank == sender else dist.recv)(tensor, 1 - world.rank)


def timed(world, function) -> float:
    """Return the median seconds of a call that all ranks make at the same time; the first does not count."""
    taken = []
    for _ in range(1 + REPEATS):
        rest()
        begin = clock.now(world.device)
        function()
        taken.append(clock.now(world.device) - begin)
    return median(taken[1:])


def answer(world, question) -> dict:
    """Build the model that is asked for, measure, and return the `Machine` as a dictionary."""
    q = SimpleNamespace(**question)
    if q.input:  # the shape of a sample, which only a reader's own model has
        return asdict(measure_own(world, q))
    model = models.build(q.model, classes=q.classes, channels=q.channels, image_size=q.image_size, norm=q.norm)
    images = torch.randn(max(q.sizes), q.channels, q.image_size, q.image_size)
    return asdict(measure(world, dict.fromkeys(q.sizes, model), images, q.optimizer, q.budget))


def measure_own(world, question) -> Machine:
    """Return the `Machine` as a reader's own model finds it.

    The sizes follow each other, the smallest first, and do not take turns: after larger batches PyTorch has memory at
    hand which a training has to ask the system for in every step. What takes longer than the budget is left out.
    """
    q, began, costs = question, time.monotonic(), {}
    own = OwnModel.wanted(q)
    by_size, per_sample = own.with_values(q.sizes, world.device), 0.0
    for size, model in by_size.items():
        spent = gather_objects(time.monotonic() - began)[0]
        if len(costs) > 1 and spent + (1 + REPEATS) * per_sample * size > q.budget:
            break
        sample = own.samples(size).to(world.device)
        sample = torch.randn_like(sample) if sample.is_floating_point() else sample
        try:  # no halves: the plan has no schedule for them, and the library cannot part a block that ends in a view
            here = cost.measure({size: model}, sample, repeats=REPEATS, halves=False)
        except (Exception, SystemExit) as error:  # the reader's own code
            raise UserError(f"--model {q.model} does not compute a batch of {size} ({error_line(error)})") from None
        costs |= slowest(here)
        per_sample = cost.total(costs[size]) / size
    return machine_of(world, costs, by_size[min(by_size)], q.optimizer)


def answer_question(folder, function):
    """Read a folder's question in every process; rank 0 writes what the function of world and question returns."""
    question = json.loads(Path(folder, "question.json").read_text())
    write_result(folder, lambda world: function(world, question))


if __name__ == "__main__":
    end(answer_question(sys.argv[1], answer))

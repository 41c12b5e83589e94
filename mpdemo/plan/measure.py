"""Measure what the plan needs of this machine's devices: blocks, update and messages, or whole steps of a rung.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.plan.measure FOLDER

It reads ``question.json`` in the folder, and rank 0 writes ``summary.json`` there. ``python -m mpdemo plan --cost
measure`` starts it (machine.py).
"""

import gc
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
from mpdemo.models.own import OwnModel
from mpdemo.plan import cost
from mpdemo.plan.machine import Machine
from mpdemo.settings import Settings, checked
from mpdemo.trial import Trial, build_model, is_per_device, join_world, random_batch
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects, rest
from mpdemo.world.launch import end

SHORT, LONG = 16 * 2**10, 8 * 2**20  # bytes of the two messages through which a line is laid
REPEATS = 9
STEPS = 7  # of a rung, and two before them that are not counted
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}  # by their names in mpdemo.plan.memory.STATES


def timed(world, function, repeats=REPEATS, unseen=1) -> float:
    """Return the median seconds of a call that all ranks make at the same time; the first ones do not count."""
    taken = []
    for _ in range(unseen + repeats):
        rest()
        begin = clock.now(world.device)
        function()
        taken.append(clock.now(world.device) - begin)
    return median(taken[unseen:])


def measure(world, by_size, sample, optimizer, budget=60.0) -> Machine:
    """Measure in all ranks at the same time; of blocks, the slowest rank's costs. All ranks must call this.

    `by_size`, `sample` and `budget` are those of `mpdemo.plan.cost.measure`, `optimizer` is a key of OPTIMIZERS.
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
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update = timed(world, OPTIMIZERS[optimizer](parameters, lr=1e-6).step)
    latency, per_byte = message(world)
    return Machine(world.world_size, costs, update / sum(p.nbytes for p in parameters), latency, per_byte)


def message(world) -> tuple[float, float]:
    """Return the seconds of a short message from one device to another, and those of each further byte."""
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


def measure_own(world, q) -> Machine:
    """Return the `Machine` as a reader's own model finds it.

    The sizes follow each other, the smallest first: after larger batches PyTorch keeps memory that a run has to
    ask the system for in every step. What takes longer than the budget is left out.
    """
    began, costs, per_sample = time.monotonic(), {}, 0.0
    own = OwnModel.wanted(q)
    by_size = own.with_values(q.sizes, world.device)
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


def step_seconds(world, settings, classes, channels) -> float:
    """Run a few steps of a training run on random images; return the median seconds. All ranks must call this."""
    facts, trial = {"classes": classes, "channels": channels}, None
    if is_per_device(settings) or world.rank == 0:
        complete = checked(settings, world.world_size if is_per_device(settings) else None)
        trial = Trial(settings, world, build_model(complete, **facts), random_batch(complete, **facts))

    def step():
        if trial:
            trial.step()
            for device in trial.devices:
                clock.wait(device)
        rest()

    seconds = gather_objects(timed(world, step, STEPS, unseen=2))[0]
    if trial:
        trial.end()
    return seconds


def answer(world, question) -> dict:
    """Measure what is asked for: the steps of `settings`, until the budget is spent, or a `Machine`."""
    q, began, seconds = SimpleNamespace(**question), time.monotonic(), []
    if hasattr(q, "settings"):
        for words in q.settings:
            spent = gather_objects(time.monotonic() - began)[0] > q.budget
            seconds.append(None if spent else step_seconds(world, Settings(**words), q.classes, q.channels))
            gc.collect()
        return {"seconds": seconds}
    if q.input:  # the shape of a sample, which only a reader's own model has
        return asdict(measure_own(world, q))
    model = models.build(q.model, classes=q.classes, channels=q.channels, image_size=q.image_size, norm=q.norm)
    images = torch.randn(max(q.sizes), q.channels, q.image_size, q.image_size)
    return asdict(measure(world, dict.fromkeys(q.sizes, model), images, q.optimizer, q.budget))


def main(folder):
    """Read a folder's question in every process; rank 0 writes the answer."""
    question = json.loads(Path(folder, "question.json").read_text())
    with join_world() as world:
        result = answer(world, question)
    if world.rank == 0:
        Path(folder, "summary.json").write_text(json.dumps(result))


if __name__ == "__main__":
    end(main(sys.argv[1]))

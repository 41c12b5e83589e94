"""What a process of a sharded run stores, and what it sends in a step, counted. A job starts this in processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.sharding runs/41_bytes

Every way of `WAYS` does a few steps of the course model. Rank 0 writes ``summary.json``. The kernel sees none of what
NCCL sends, so the processes compute on CPU cores. Taught in notebooks/41_fsdp.ipynb.
"""

import os
import sys

import psutil

from mpdemo.measure.compare import model_and_batch, write_result
from mpdemo.measure.traces import typical
from mpdemo.measure.trial import Trial, record, relative_difference
from mpdemo.predict.counting import SETTLED, local, sent_in_a_step
from mpdemo.settings import Settings
from mpdemo.world.collectives import gather_objects, rest, whole
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.processes import end

NEVER = "fsdp, never resharded"
WAYS = {"ddp": "ddp", "fsdp": "fsdp", NEVER: "fsdp"}  # name -> rung
STEPS = SETTLED + 1  # until the messages of one are counted


def written(trial) -> list[int]:
    """Return the bytes that each rank's process writes in a step, by its kernel's count; gloo writes to sockets."""
    rest()
    before = psutil.Process().io_counters().write_chars
    trial.step()
    return gather_objects(psutil.Process().io_counters().write_chars - before)


def stored(trial) -> dict:
    """Return the bytes of the weights, gradients and optimizer states that this rank keeps between two steps."""
    weights = list(trial.rung.model.parameters())
    states = [value for state in trial.rung.optimizer.state.values() for value in state.values()]
    states = [state for state in states if state.dim()]  # not the count of steps, a scalar
    kept = {"weights": weights, "gradients": [weight.grad for weight in weights], "optimizer": states}
    return {name: sum(local(t).nbytes for t in tensors) for name, tensors in kept.items()}


def weights(trial) -> dict:
    """Return a trial's weights by name, sharded ones whole."""
    return {name: whole(parameter.detach()) for name, parameter in trial.rung.model.named_parameters()}


def measure(world) -> dict:
    """Return for each way what a rank `sent` in a step, and all have `stored` and `written`, and when (`timeline`).

    And how far the weights were from the single device's after `STEPS` (`relative_difference`).
    """
    model, batch = model_and_batch(Settings(rung="ddp"))
    results, single = {}, Trial(Settings(rung="single"), world, model, batch)
    for _ in range(STEPS):
        single.step()
    for way, rung in WAYS.items():
        trial = Trial(Settings(rung=rung), world, model, batch)
        if way == NEVER:
            # as fully_shard(..., reshard_after_forward=False)
            trial.rung.model.set_reshard_after_forward(False)
        sent, apart = sent_in_a_step(trial), relative_difference(weights(trial), weights(single))
        results[way] = {"sent": sent, "stored": gather_objects(stored(trial)), "weights_apart": apart}
        results[way] |= {"written": written(trial), "timeline": typical(record(trial))["events"]}
    return results


if __name__ == "__main__":
    os.environ |= ON_THE_CPU
    end(write_result(sys.argv[1], lambda world: {"ways": measure(world)}))

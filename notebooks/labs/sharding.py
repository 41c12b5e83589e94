"""What a process of a sharded run stores, and what it sends in a step, counted. A job starts this in processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.sharding runs/07_bytes

Every way of `WAYS` does a few steps of the course model. Rank 0 writes ``summary.json``. The kernel sees none of what
NCCL sends, so the processes compute on CPU cores. Taught in notebooks/07_sharding.ipynb.
"""

import os
import sys
from contextlib import contextmanager

import psutil
from torch.profiler import record_function

from mpdemo.labs.profile_parts import STEP, recording
from mpdemo.measure.compare import model_and_batch, write_result
from mpdemo.measure.timeline import merge
from mpdemo.measure.trial import Trial, observe, relative_difference
from mpdemo.predict.counting import SETTLED, local, sent_in_a_step
from mpdemo.settings import Settings, recipe
from mpdemo.training.recorder import Recorder
from mpdemo.world.collectives import gather_objects, rest, whole
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.launch import end

NEVER = "fsdp, never resharded"
WAYS = {"ddp": "ddp", "fsdp": "fsdp", NEVER: "fsdp"}  # name -> rung
KINDS = {"gloo:all_reduce": "A", "gloo:all_gather": "G"}  # range of PyTorch's profiler -> kind of a timeline

STEPS = SETTLED + 1  # until the messages of one are counted


def timeline(trial, world) -> list[dict]:
    """Return the timeline of a step of all ranks with its messages, as `mpdemo.measure.timeline` describes it.

    The messages are those of PyTorch's profiler, from the moment one of gloo's threads takes them up until their end.
    gloo makes a reduce-scatter out of an all-reduce, so it is one here.
    """
    recorder = Recorder(world.rank, world.device)
    observe(trial, recorder)
    recorded = recording()
    trial.step(within=as_a_step(recorded))
    step = recorder.steps[-1]
    zero = step["start"] - next(e.time_range.start for e in recorded.events() if e.name == STEP) / 1e6
    for event in recorded.events():
        if kind := KINDS.get(event.name):
            start, end = (zero + microseconds / 1e6 for microseconds in (event.time_range.start, event.time_range.end))
            row = {"rank": world.rank, "kind": kind, "stage": 0, "microbatch": 0, "start": start, "end": end}
            step["events"].append(row)
    return merge(gather_objects(step))


@contextmanager
def as_a_step(profiler):
    """Record a ``with`` block as one step."""
    with profiler, record_function(STEP):
        yield


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
    model, batch = model_and_batch(Settings(**recipe("ddp")))
    results, single = {}, Trial(Settings(**recipe("single")), world, model, batch)
    for _ in range(STEPS):
        single.step()
    for way, rung in WAYS.items():
        trial = Trial(Settings(**recipe(rung, timeline=False)), world, model, batch)
        if way == NEVER:
            trial.rung.model.set_reshard_after_forward(False)  # as fully_shard(..., reshard_after_forward=False)
        sent, apart = sent_in_a_step(trial), relative_difference(weights(trial), weights(single))
        results[way] = {"sent": sent, "stored": gather_objects(stored(trial)), "weights_apart": apart}
        results[way] |= {"written": written(trial), "timeline": timeline(trial, world)}
    return results


if __name__ == "__main__":
    os.environ |= ON_THE_CPU
    end(write_result(sys.argv[1], lambda world: {"ways": measure(world)}))

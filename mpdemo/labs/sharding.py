"""What a process of a sharded training stores, and what it sends in a step, counted. A job starts this in processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.sharding runs/07_bytes

Every way of `WAYS` does two steps of the story. Rank 0 writes ``summary.json``. Taught in notebooks/07_sharding.ipynb.
"""

import sys

from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from mpdemo.labs.counting import STEPS, sent_in_a_step
from mpdemo.labs.harness import write_result
from mpdemo.labs.ladder import model_and_batch
from mpdemo.labs.profile_parts import STEP, recording
from mpdemo.trial import Trial
from mpdemo.notebook.story import story
from mpdemo.settings import Settings
from mpdemo.timeline import read
from mpdemo.timeline.observe import observe
from mpdemo.timeline.record import Recorder
from mpdemo.trial import relative_difference
from mpdemo.world.collectives import gather_objects, whole
from mpdemo.world.launch import end

WAYS = {  # name -> rung and its settings
    "ddp": {"rung": "ddp"},
    "fsdp": {"rung": "fsdp"},
    "fsdp, never resharded": {"rung": "fsdp", "reshard": "never"},
    "tensor": {"rung": "tensor"},
}
KINDS = {"all_reduce": "A", "all_gather": "G", "reduce_scatter": "R"}  # in the name of a range -> kind of a timeline


def stored(trial) -> dict:
    """Return the bytes of the weights, gradients and optimizer states that this rank keeps between two steps."""
    parameters = list(trial.rung.named_parameters().values())
    states = [value for state in trial.optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(map(local_bytes, parameters)),
        "gradients": sum(local_bytes(parameter.grad) for parameter in parameters),
        "optimizer": sum(local_bytes(state) for state in states if state.dim()),  # not the count of steps, a scalar
    }


def local_bytes(tensor) -> int:
    """Return the bytes that this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def timeline(trial, world) -> list[dict]:
    """Return the timeline of a step of all ranks with its messages, as `mpdemo.timeline.read` describes it.

    The messages are those of PyTorch's profiler: with gloo from the moment a thread takes them up until their end, with
    NCCL only while they are enqueued. gloo makes a reduce-scatter out of an all-reduce, so it is one here.
    """
    recorder = Recorder(world.rank, world.device)
    observe(trial.rung, trial.optimizer, recorder)
    for _ in range(STEPS):  # DDP decides once more what goes into which bucket
        trial.step()
    with recording() as recorded, record_function(STEP):
        trial.step()
    step = recorder.steps[-1]
    zero = step["start"] - next(e.time_range.start for e in recorded.events() if e.name == STEP) / 1e6
    for event in recorded.events():
        backend, _, name = event.name.partition(":")
        kind = next((KINDS[word] for word in KINDS if word in name), None)
        if kind and backend in ("gloo", "nccl"):
            start, end = (zero + microseconds / 1e6 for microseconds in (event.time_range.start, event.time_range.end))
            row = {"rank": world.rank, "kind": kind, "stage": 0, "microbatch": 0, "start": start, "end": end}
            step["events"].append(row)
    return read.merge(gather_objects(step))


def measure(world) -> dict:
    """Return for each way what each rank `stored`, what one of them `sent` in a step, and when (`timeline`).

    And how far its weights are after both steps from those of the single device (`relative_difference`).
    """
    model, batch = model_and_batch(Settings(**story("ddp")))
    results, single = {}, Trial(Settings(**story("single")), world, model, batch)
    for _ in range(STEPS):
        single.step()
    reference = {name: parameter.detach() for name, parameter in single.rung.named_parameters().items()}
    for way, changes in WAYS.items():
        trial = Trial(Settings(**story(**changes, timeline=False)), world, model, batch)
        sent = sent_in_a_step(trial)
        weights = {name: whole(parameter.detach()) for name, parameter in trial.rung.named_parameters().items()}
        apart = relative_difference(weights, reference)
        results[way] = {"sent": sent, "stored": gather_objects(stored(trial)), "weights_apart": apart}
        results[way]["timeline"] = timeline(trial, world)
    return results


def main(out):
    """Count in every process; rank 0 writes the result."""
    write_result(out, lambda world: {"ways": measure(world)})


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

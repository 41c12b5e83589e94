"""What a process of a sharded training stores, and what it sends in a step, counted. A job starts this in processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.sharding runs/07_bytes

Every way of `WAYS` does a step of the story. A message is noted where PyTorch hands it to the backend, so those that
DDP sends from C++ are counted as well. Rank 0 writes ``summary.json``. Taught in notebooks/07_sharding.ipynb.
"""

import math
import sys

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpdemo.labs.harness import join_world
from mpdemo.labs.ladder import model_and_batch
from mpdemo.labs.trial import Trial
from mpdemo.notebook.story import story
from mpdemo.settings import Settings
from mpdemo.training.measure import relative_difference
from mpdemo.training.run_log import RunLog
from mpdemo.world.collectives import gather_objects, whole

WAYS = {  # name -> rung and its settings
    "ddp": {"rung": "ddp"},
    "fsdp": {"rung": "fsdp"},
    "fsdp, never resharded": {"rung": "fsdp", "reshard": "never"},
    "tensor": {"rung": "tensor"},
}
KINDS = {  # PyTorch's operators, of tensors and of DTensors -> the collective
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}
STEPS = 2  # the last one is counted: in its first step DDP decides what goes into which bucket
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier")  # these carry no tensor


class CountMessages(TorchDispatchMode):
    """Note the messages of a ``with`` block in `messages`: pairs (collective, bytes of the whole tensor).

    The whole tensor is what is reduced, or what all parts make together. An unknown operator is noted by its name.
    """

    def __init__(self):
        super().__init__()
        self.messages = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if function.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self.messages.append((KINDS.get(name, name), max(size(value) for value in (result, *args))))
        return result


def size(value) -> int:
    """Return the bytes of a tensor, or of all in a list; 0 for what is no tensor."""
    if isinstance(value, list | tuple):
        return sum(size(part) for part in value)
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def sent_in_a_step(trial) -> dict:
    """Return how many messages of each kind a rank sends in a step, and their bytes; all ranks must call this.

    Returns
    -------
    dict
        Collective -> ``{"messages": ..., "bytes": ...}``.
    """
    for _ in range(STEPS - 1):
        trial.step()
    with CountMessages() as count:
        trial.step()
    kinds = dict.fromkeys(kind for kind, _ in count.messages)
    sizes = {kind: [size for name, size in count.messages if name == kind] for kind in kinds}
    return {kind: {"messages": len(bytes_), "bytes": sum(bytes_)} for kind, bytes_ in sizes.items()}


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


def padded_bytes(parameters, ranks) -> int:
    """Return the bytes of parameters that are gathered from equal parts: rows are added until they can be shared.

    Examples
    --------
    >>> padded_bytes([torch.zeros(3, 5)], ranks=2)
    80
    """
    rows = [(math.ceil(p.shape[0] / ranks) * ranks, p[0].numel() * p.element_size()) for p in parameters]
    return sum(count * bytes_of_row for count, bytes_of_row in rows)


def measure(world) -> dict:
    """Return, for each way, what each rank `stored`, what one of them `sent` in a step, and how far its weights are.

    After both steps, from those of the single device: the largest relative difference (`relative_difference`).
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
    return results


def main(out) -> int:
    """Count in every process; rank 0 writes the result."""
    with join_world() as world:
        result = measure(world)
    RunLog(out, world.rank == 0).finish({"ways": result})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

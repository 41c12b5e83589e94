"""What a process sends and holds in a step, counted: every operation of PyTorch passes through a dispatch mode.

A message is noted where PyTorch hands it to the backend, so those that DDP sends from C++ are counted as well. Taught
in notebooks/07_sharding.ipynb.
"""

import gc
import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpdemo.plan.meter import rounded

KINDS = {  # PyTorch's operators, of tensors and of DTensors -> the collective
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}
STEPS = 2  # of `sent_in_a_step`: in the first one DDP decides what goes into which bucket
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "recv_")  # no tensor, or one that another rank sends


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
    count = CountMessages()
    trial.step(within=count)
    kinds = dict.fromkeys(kind for kind, _ in count.messages)
    sizes = {kind: [size for name, size in count.messages if name == kind] for kind in kinds}
    return {kind: {"messages": len(bytes_), "bytes": sum(bytes_)} for kind, bytes_ in sizes.items()}


class LiveMemory(TorchDispatchMode):
    """Keep in `peak` the most bytes that the tensors of a ``with`` block take together, after any operation.

    Storages are counted as they are, so one that FSDP empties and fills again counts while it is full. They are added
    up while `counting`, where there may be a peak: where the last sum and what is new since exceed it.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.bound, self.counting = weakref.WeakSet(), 0, 0, True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the operations on this rank's part, which are counted
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and (storage := value.untyped_storage()) not in self.storages:
                self.storages.add(storage)
                self.bound += rounded(storage.nbytes())
        if self.counting and (self.bound > self.peak or function.namespace != "aten"):
            self.bound = sum(rounded(storage.nbytes()) for storage in self.storages)
            self.peak = max(self.peak, self.bound)
        return result


def peak_of_a_step(trial) -> int:
    """Return the bytes of all tensors at the worst moment of a step, when the optimizer has its states.

    On a GPU what PyTorch allocated there.
    """
    gpu = next((device for device in trial.devices if device.type == "cuda"), None)
    if gpu:
        trial.step()
        torch.cuda.reset_peak_memory_stats(gpu)
        trial.step()
        return torch.cuda.max_memory_allocated(gpu)
    live = LiveMemory()
    live.counting = False
    trial.step(within=live)  # what lives longer than a step is known after one
    gc.collect()
    live.counting = True
    trial.step(within=live)
    return live.peak

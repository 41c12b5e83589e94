"""Count what a process holds and sends: every operation of PyTorch passes through a dispatch mode.

A message is noted where PyTorch hands it to the backend, so those that DDP sends from C++ are counted as well. Works on
real tensors and on fake ones. Taught in notebooks/41_fsdp.ipynb.
"""

import gc
import weakref
from collections import defaultdict
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from mpdemo.models.private_torch import TorchDispatchMode

SETTLED = 3  # steps after which DDP has its final buckets; in the third it makes them anew
BLOCK = 512  # bytes; PyTorch's CUDA allocator hands out multiples of it
KINDS = {  # PyTorch's operators, of tensors and of DTensors -> the collective
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}
# no tensor, or one that another rank sends
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "recv_")


class Watch(TorchDispatchMode):
    """A mode that tells `_watch` of operations, but not of PyTorch's asking for a fake tensor's device.

    That comes several times with each operation, and went through every mode; the tensor answers it by itself.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:
            return args[0].__torch_dispatch__(function, types, args)
        return self._watch(function, types, args, kwargs or {})


class CountMessages(Watch):
    """Note the messages of a ``with`` block in `messages`: pairs (collective, bytes of the whole tensor).

    The whole tensor is what is reduced, or what all parts make together. An unknown operator is noted by its name.
    """

    def __init__(self):
        super().__init__()
        self.messages = []

    def _watch(self, function, types, args, kwargs):
        result = function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if function.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self.messages.append((KINDS.get(name, name), max(size(value) for value in (result, *args))))
        return result

    def by_kind(self) -> dict:
        """Return the bytes of each kind of message: collective -> bytes."""
        total = defaultdict(int)
        for kind, bytes_ in self.messages:
            total[kind] += bytes_
        return dict(total)


class LiveMemory(Watch):
    """Count the bytes of all tensors of a ``with`` block, on each device: `live` now, and every level since `start`.

    A storage counts from the first operation that sees it until it is freed, and as it is: one that FSDP empties and
    fills again counts while it is full.
    """

    def __init__(self):
        super().__init__()
        self.known, self.live, self.levels = {}, defaultdict(int), defaultdict(list)

    def start(self) -> None:
        """Forget all levels but the present ones."""
        self.levels = defaultdict(list, {device: [bytes_] for device, bytes_ in self.live.items()})

    def peak(self) -> int:
        """Return the most bytes on the CPU since `start`."""
        return max(self.levels["cpu"], default=0)

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def noted(storage, bytes_):
            resize(storage, bytes_)
            if weakref.ref(storage) in self.known:
                self.note(storage, None)
            return storage

        self.replaced = patch.object(torch.UntypedStorage, "resize_", noted)
        self.replaced.start()  # FSDP calls it from Python, and no operation follows
        return super().__enter__()

    def __exit__(self, *error):
        self.replaced.stop()
        return super().__exit__(*error)

    def _watch(self, function, types, args, kwargs):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the operations on this rank's part, which are counted
        result = function(*args, **kwargs)
        for value in tensors_in((args, kwargs, result)):
            self.note(value.untyped_storage(), value)
        return result

    def note(self, storage: torch.UntypedStorage, value: torch.Tensor | None) -> None:
        """Count the storage of a tensor where it is new, or its size has changed."""
        bytes_, found = rounded(storage.nbytes()), self.known.get(weakref.ref(storage))
        if found and found[1] == bytes_:
            return
        device = found[0] if found else str(value.device)
        self.known[weakref.ref(storage, self.forget)] = device, bytes_
        self.live[device] += bytes_ - (found[1] if found else 0)
        self.levels[device].append(self.live[device])

    def move(self, storage: torch.UntypedStorage, device: str) -> None:
        """Count a storage that is known on another device from now on."""
        old, bytes_ = self.known[weakref.ref(storage)]
        self.known[weakref.ref(storage)] = device, bytes_
        self.live[old] -= bytes_
        self.live[device] += bytes_

    def forget(self, reference: weakref.ref) -> None:
        """Count a storage that is freed."""
        device, bytes_ = self.known.pop(reference)
        self.live[device] -= bytes_


def has_16_bits(value) -> bool:
    """Return whether a value is a tensor of 16-bit floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def tensors_in(values) -> list:
    """Return all tensors of arguments or results, also those in lists; PyTorch's trees take several times as long."""
    if isinstance(values, torch.Tensor):
        return [values]
    inner = (
        values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    )
    return [tensor for value in inner for tensor in tensors_in(value)]


def size(values) -> int:
    """Return the bytes of a tensor, or of all in a list; 0 for what is no tensor."""
    return sum(tensor.nbytes for tensor in tensors_in(values))


def rounded(bytes_):
    """Return what PyTorch's allocator hands out for so many bytes."""
    return -(-bytes_ // BLOCK) * BLOCK


def sent_in_a_step(trial) -> dict:
    """Return what a rank sends in a step: collective -> how many messages, and bytes. All ranks must call this."""
    for _ in range(SETTLED):
        trial.step()
    count = CountMessages()
    trial.step(within=count)
    kinds = [kind for kind, _ in count.messages]
    return {
        kind: {"messages": kinds.count(kind), "bytes": total} for kind, total in count.by_kind().items()
    }


class Peak(NamedTuple):
    """Memory of one device at the peak of a training step, in bytes.

    `gradients` are those that exist at the peak: none if it is the end of the forward pass and each step begins without
    any, all if DDP keeps them in its buckets. `activations` is all that is not weights, gradients or optimizer state:
    saved activations, the batch, and temporary tensors.
    """

    weights: int  # and buffers
    gradients: int
    optimizer: int
    activations: int


def peak_of_a_step(trial) -> list[Peak]:
    """Return what each device of this process holds at the peak of a step, when the optimizer has its states.

    On a CPU the peak is that of all tensors; on a GPU it is the allocator's, which also has cuBLAS's workspaces.
    """
    live, parameters, arrived = LiveMemory(), list(trial.rung.model.parameters()), {}
    trial.step(within=live)  # what lives longer than a step is known after one
    storages = {p: weakref.ref(local(p.grad).untyped_storage()) for p in parameters if p.grad is not None}
    trial.rung.optimizer.zero_grad()
    gc.collect()
    live.start()

    def arrive(p):
        in_bucket = p in storages and storages[p]() is not None
        arrived.setdefault(p, 0 if in_bucket else len(live.levels[str(p.device)]))

    hooks = [p.register_post_accumulate_grad_hook(arrive) for p in parameters if p.requires_grad]
    on_gpu = [device for device in trial.devices if device.type == "cuda"]
    for device in on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    trial.step(within=live)
    for hook in hooks:
        hook.remove()
    allocated = {str(device): torch.cuda.max_memory_allocated(device) for device in on_gpu}
    devices = dict.fromkeys(map(str, trial.devices))
    return [
        _parts(trial.rung, live.levels[device], arrived, device, allocated.get(device))
        for device in devices
    ]


def _parts(rung, levels, arrived, device, allocated) -> Peak:
    """Divide the peak of a device's `levels` by what holds it; `allocated` is the peak by its allocator."""
    at_peak = levels.index(max(levels))
    parameters, states = list(rung.model.parameters()), rung.optimizer.state.values()
    # Zero-bubble schedules do not tell when the gradient of a weight comes: then from the beginning.
    gradients = [p for p in parameters if p.requires_grad and arrived.get(p, 0) <= at_peak]
    kinds = (
        [*parameters, *rung.model.buffers()],
        gradients,
        tensors_in([list(state.values()) for state in states]),
    )
    held = [size([local(t) for t in tensors if str(t.device) == device]) for tensors in kinds]
    return Peak._make([*held, (allocated or max(levels)) - sum(held)])


def local(tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

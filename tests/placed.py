"""Tensors that claim a device of their own, so that a missing ``.to(device)`` is an error on a machine without GPUs.

A `Placed` tensor lies on the CPU and says that it lies on ``cpu:1`` or ``cpu:2``; an operation on tensors of two
devices is refused as CUDA refuses it. What it cannot see: what is asynchronous on a GPU, other kernels and their
rounding, memory, NCCL, and code behind ``device.type == "cuda"``.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
HOST = torch.device("cpu")


class Placed(torch.Tensor):
    """A tensor of the CPU that claims to be on another device."""

    @staticmethod
    def __new__(cls, data, device):
        shape = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        return cls._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=device, **shape)

    def __init__(self, data, device):
        self.data_on_cpu = data

    def tolist(self):
        """As ``tensor.tolist()``, which PyTorch has for its own tensors only."""
        return self.data_on_cpu.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return run(function, arguments, options or {})


class Devices(TorchDispatchMode):
    """A ``with`` block in which tensors that are made on ``cpu:1`` stay there."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return run(function, arguments, options or {})


def run(function, arguments, options):
    """Run an operation on the CPU; refuse it where its tensors are on several devices."""
    tensors = [value for value in tree_flatten((arguments, options))[0] if isinstance(value, torch.Tensor)]
    device = device_of(function, tensors)
    if function is torch.ops.aten._to_copy.default or not tensors:
        device = options.get("device") or device
    options_on_cpu = options | ({"device": HOST} if options.get("device") is not None else {})
    arguments_on_cpu, options_on_cpu = tree_map_only(
        Placed, lambda t: t.data_on_cpu, (arguments, options_on_cpu)
    )
    result = function(*arguments_on_cpu, **options_on_cpu)
    if device == HOST:
        return result
    result = tree_map_only(torch.Tensor, lambda t: Placed(t, device), result)
    return return_and_correct_aliasing(function, arguments, options, result) if tensors else result


def device_of(function, tensors):
    """Return the one device of an operation, by CUDA's rules: a number of the CPU may take part in pointwise ones."""
    devices = {tensor.device for tensor in tensors}
    if function in MOVES:
        return tensors[0].device
    if len(devices) > 1 and torch.Tag.pointwise in function.tags:
        devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device != HOST}
    if len(devices) > 1:
        raise RuntimeError(f"{function}: tensors on several devices: {sorted(map(str, devices))}")
    return devices.pop() if devices else HOST

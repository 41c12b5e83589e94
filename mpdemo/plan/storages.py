"""Count the bytes of all tensors that are alive, real ones or fake, device by device."""

import weakref

BLOCK = 512  # bytes; PyTorch's CUDA allocator hands out multiples of it


def count_storages():
    """Return a dispatch mode that counts the bytes of all storages created under it, by device.

    Its ``live`` and ``peak`` map a device's name to bytes; assign ``peak = dict(live)`` to start a new measurement.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.live, self.peak, self.seen = {}, {}, weakref.WeakKeyDictionary()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.add(leaf)
            return result

        def add(self, tensor):
            storage, device = tensor.untyped_storage(), str(tensor.device)
            if storage in self.seen:  # a view, or the result of an operation in place
                return
            self.seen[storage] = True
            size = rounded(storage.nbytes())
            self.live[device] = self.live.get(device, 0) + size
            self.peak[device] = max(self.peak.get(device, 0), self.live[device])
            weakref.finalize(storage, self.release, device, size)

        def release(self, device, size):
            self.live[device] -= size

    return Count()


def move(module, device):
    """Replace a module's parameters and buffers: ``Module.to`` does nothing between two fake CPU devices."""
    import torch

    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(torch.empty_like(parameter, device=device))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def rounded(size):
    """Return the bytes that PyTorch's allocator hands out for `size` bytes."""
    return -(-size // BLOCK) * BLOCK

"""What a part of a model keeps: bytes for the backward pass, and the memory over a step.

Taught in notebooks/70_does_it_fit.ipynb, which writes `kept`, 71_make_it_fit.ipynb and 74_offload_8bit.ipynb.
"""

import torch

from mpdemo.predict.counting import LiveMemory


def kept(function, x, weights=()):
    """Return the bytes that autograd keeps for the backward pass, without the weights."""
    own, found = {weight.untyped_storage().data_ptr() for weight in weights}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(x)
    return sum(size for address, size in found.items() if address not in own)


def levels(step, *there) -> list:
    """Return how much a step holds beside the tensors that are there, after each of its allocations."""
    with LiveMemory() as memory:
        for tensor in there:
            tensor.detach()  # so that it is counted now
        before = memory.live["cpu"]
        memory.start()
        step()
    return [
        {"allocation": number, "MiB": (level - before) / 2**20}
        for number, level in enumerate(memory.levels["cpu"])
    ]


def peak(step, *there) -> float:
    """Return the most MiB that a step holds beside the tensors that are there."""
    return max(row["MiB"] for row in levels(step, *there))

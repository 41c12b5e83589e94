"""The memory of one device at the peak of a step, and all that one process held and sent in a step."""

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device at the peak of a training step, in bytes.

    `gradients` are those that exist at the peak: none if it is the end of the forward pass and each step begins without
    any, all if DDP keeps them in its buckets. `activations` is all that is not weights, gradients or optimizer state:
    saved activations, the batch, and temporary tensors of the backward pass.
    """

    device: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self):
        """Bytes of all four together."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def with_peak(self, peak):
        """Return the same with so many bytes at the peak."""
        return replace(self, activations=peak - self.weights - self.gradients - self.optimizer)


class Step(NamedTuple):
    """What one process held in a step, and sent."""

    always: list  # of DeviceMemory by device, with all gradients and without activations
    levels: list  # of arrays: the bytes of all tensors on each device, each time that they grew
    arrived: list  # by device: (the first level with it, its bytes) of each gradient
    messages: dict  # collective -> bytes
    buffers: int  # bytes that DDP broadcasts
    batch: int  # bytes of the images and labels

    def devices(self) -> list[DeviceMemory]:
        """Return the memory of every device at its peak, with the gradients that are there at that moment."""
        found = []
        for device, levels, arrived in zip(self.always, self.levels, self.arrived, strict=True):
            there = sum(bytes_ for level, bytes_ in arrived if level <= levels.argmax())
            found.append(replace(device, gradients=there).with_peak(int(levels.max())))
        return found

    def towards(self, other, share):
        """Interpolate between this step and another with the same operations; None where they differ."""
        pairs = list(zip(self.levels, other.levels, strict=True))
        if any(len(a) != len(b) for a, b in pairs) or self.messages.keys() != other.messages.keys():
            return None
        messages = {kind: round(a + share * (other.messages[kind] - a)) for kind, a in self.messages.items()}
        levels, batch = [a + share * (b - a) for a, b in pairs], self.batch + share * (other.batch - self.batch)
        return self._replace(levels=levels, messages=messages, batch=round(batch))

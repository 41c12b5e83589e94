"""What happens in each phase of a step: in the first block's forward pass, say, or the last one's backward pass."""

from collections import defaultdict

import numpy as np

from mpdemo.tools.plan.layers import differentiable


class Phases:
    """What happens in each phase of a step, whose borders are those of the equal blocks."""

    def __init__(self, memory, kernels):
        self.memory, self.kernels, self.now, self.crossing = memory, kernels, None, 0
        self.levels, self.work = defaultdict(list), defaultdict(list)

    def enter(self, name):
        """Begin a phase; what happened since the last one began is that one's."""
        self.levels[self.now] += self.memory.levels["cpu"]
        self.work[self.now] += self.kernels.work
        self.memory.start()
        self.kernels.work, self.now = [], name

    def follow(self, blocks):
        """Begin a phase where a block begins and ends, forward and backward."""
        places = ["first", "second", *["inner"] * (len(blocks) - 4), "last but one", "last"]
        for block, place in zip(blocks, places, strict=True):
            # Before FSDP's own hooks, which gather and free.
            block.register_forward_pre_hook(lambda _, inputs, place=place: self._begin(place, inputs), prepend=True)
            block.register_forward_hook(lambda _, inputs, outputs, place=place: self._end(place, outputs))

    def _begin(self, place, inputs):
        self.enter(f"forward {place}")
        if place == "first":
            self._at_gradient(inputs, "backward before")

    def _end(self, place, outputs):
        self.enter("after" if place == "last" else f"between {place}")
        self.crossing = next((t.nbytes for t in differentiable(outputs)), 0)
        self._at_gradient(outputs, f"backward {place}")

    def _at_gradient(self, values, name):
        """Begin a phase when the gradient of the first tensor is there; a hook must return nothing."""
        for tensor in list(differentiable(values))[:1]:
            tensor.register_hook(lambda gradient: self.enter(name))

    def found(self):
        """Return levels and work by phase, as arrays."""
        names = [name for name in self.levels if name not in (None, "end")]
        kept = [name for name in names if not name.endswith("inner")]  # another block's peak is higher
        levels = {name: np.array(self.levels[name], dtype=float) for name in kept}
        return levels, {name: np.array(self.work[name], dtype=float).reshape(-1, 4) for name in names}

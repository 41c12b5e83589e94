"""A few steps of a model tell all others: those of more blocks, of other batches and of pipeline stages.

A model with a list of many equal blocks is computed with 4 and with 5 of them. Each phase of the step then holds,
computes and sends so much more for each further block, so that the two tell what the whole model does. In the same way
two sizes of the batch tell all others. own.py asks for them.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from mpdemo.tools.plan.layers import FEW
from mpdemo.tools.plan.own_step import Step, Way, computed

FEW_SAMPLES = 2, 4  # of a second batch: the larger one where the first is smaller


class Line(NamedTuple):
    """The steps of all sizes of a batch: one size is computed, and others lie on the line through another one."""

    model: object
    way: Way
    states: int
    size: int

    def at(self, size) -> Step:
        """Return the step of `size` samples."""
        if size == self.size:
            return self._computed(size)
        start, end = self._computed(self.size), self._computed(self.other)
        found = start.towards(end, (size - self.size) / (self.other - self.size))
        return found or self._computed(size)

    def eager(self):
        """Return the steps of eager kernels, whose time is known; that of compiled ones is a fraction of it."""
        return self._replace(way=self.way._replace(compiled=False))

    @property
    def other(self):
        """The second size."""
        return FEW_SAMPLES[0] if self.size >= FEW_SAMPLES[1] else FEW_SAMPLES[1]

    def with_host(self, step) -> tuple:
        """Return the bytes that FSDP takes from the host and gives to it in a step: layers twice, and gradients."""
        layers = self.model.layers_of(self.model.template)
        twice = sum(p.nbytes for layer in layers for p in layer.parameters()) / self.way.shards
        return step.weights - step.buffers + twice, step.trained

    def _computed(self, size):
        return whole_step(self.model, self.way, self.states, size)

    def most(self, limit) -> int | None:
        """Return the largest batch whose peak is within a limit; None where no line tells it."""
        start, end = self._computed(self.size), self._computed(self.other)
        if start.towards(end, 0) is None or start.peak == end.peak:
            return None
        at_start, at_end = (np.concatenate(list(step.levels.values())) for step in (start, end))
        slope = (at_end - at_start) / (self.other - self.size)
        always = at_start - self.size * slope
        grows = slope > 0
        return 0 if (always > limit).any() else int(((limit - always[grows]) / slope[grows]).min())


@cache
def whole_step(model, way, states, size) -> Step:
    """Return the step of a whole model; `NotPlanned` where it cannot be computed on fake tensors."""
    if not model.few:
        return computed(model, way, states, size, model.count)
    few, more = (computed(model, way, states, size, count) for count in FEW)
    return few.with_blocks(more, model.count) or computed(model, way, states, size, model.count)


class Part(NamedTuple):
    """What one part of a model that is a chain of parts holds, needs and computes for a microbatch."""

    weights: int  # bytes, as the next ones
    trained: int  # gradients
    saved: float  # by a forward pass, for the backward pass
    extra: float  # at the peak of the backward pass, above that
    seconds: float | None
    crossing: float  # bytes that it hands on


def chain(steps, size, roof) -> list[Part]:
    """Return the parts of a chain: its layers, or what comes before the equal blocks, each of these, what comes after.

    A part's phases are those between its own borders; the first part also has what comes before, the last one the loss.
    """
    model = steps.model
    if not model.few:
        return _layers(whole_step(model, *steps[1:3], size), model.sizes(), roof)
    few, more = (computed(*steps[:3], size, count) for count in FEW)
    always, always_few = more.levels["before"][0], few.levels["before"][0]  # weights, gradients and states
    entered = {name: levels[0] for name, levels in more.levels.items()}
    one_block = entered["after"] - few.levels["after"][0] - (always - always_few)
    saved = entered["forward first"] - always, one_block, entered["backward"] - entered["after"]
    names = (
        ("before", "backward before"),
        ("forward inner", "between inner", "backward inner"),
        ("after", "backward"),
    )
    (before, after), (trained, trained_after) = model.around()
    blocks = more.weights - few.weights, more.trained - few.trained
    found = []
    for held, kept, phases in zip(
        ((before, trained), blocks, (after, trained_after)), saved, names, strict=True
    ):
        found.append(_part(more, held, kept, phases, phases[-1].replace("inner", "second"), roof))
    return [found[0], *[found[1]] * model.count, found[2]]


def _layers(step, sizes, roof) -> list[Part]:
    """Return the parts of a model that is one layer after the other."""
    last, found = len(sizes) - 1, []
    borders = ["before", *(f"forward {number}" for number in range(1, len(sizes))), "backward"]
    for number, held in enumerate(sizes):
        phases = [f"{kind} {number}" for kind in ("forward", "between", "backward")]
        phases += ["before"] if number == 0 else []
        phases += ["after", "backward"] if number == last else []
        start, end = (step.levels[border][0] for border in borders[number : number + 2])
        found.append(_part(step, held, end - start, phases, f"backward {number}", roof))
    return [part._replace(crossing=step.crossing[number]) for number, part in enumerate(found)]


def _part(step, held, saved, phases, backward, roof) -> Part:
    levels = step.levels.get(backward, np.zeros(1))
    seconds = step.seconds(roof, [name for name in phases if name in step.work])
    weights, trained = held
    return Part(weights, trained, saved, levels.max() - levels[0], seconds, step.crossing[-1])

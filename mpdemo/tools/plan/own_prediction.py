"""What a way to train needs, from its step on fake tensors: memory, time, and bytes sent around rings.

Messages hide behind the computation, which they slow down; what can't hide is the first layer's gather or the last
one's reduction, and all that a block waits for. A step ends when the slowest of all devices has computed.
"""

from math import log
from typing import NamedTuple

from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.request import IN_BLOCKS, Prediction, flags_of, host_of
from mpdemo.tools.plan.roof import OPTIMIZERS, update_seconds

# An all-reduce is an all-gather and a reduce-scatter; a broadcast goes round the ring once.
HALVES = {"all-reduce": 2, IN_BLOCKS: 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}
# Seconds of a message of no bytes: to begin, and for each step of its ring within a node and between two, as NCCL
# assumes when it chooses an algorithm: baseLat, and hwLat of NVLINK and NET, of a Ring with Simple, in
# https://github.com/NVIDIA/nccl, src/graph/tuning.cc (until 2021 it took 9.6 us between nodes).
BEGINS, WITHIN, BETWEEN = 8.4e-6, 3.4e-6, 14e-6
# Kernels that compute while messages are in flight take so much longer, on the mean of four kinds of GPU
# (https://arxiv.org/abs/2507.03114).
OVERLAP = 0.189
# Standard deviation of the speed of equal GPUs: the 8 % over which those of a cluster range
# (https://arxiv.org/abs/2208.11035) are four of them.
UNEQUAL = 0.02


class Ring(NamedTuple):
    """Devices that send to one another: how many, in how many nodes, and bytes per second between them."""

    ranks: int
    nodes: int
    link: float

    def seconds(self, bytes_, messages, reached) -> float:
        """Return the seconds of so many messages, if they reach such a fraction of the link."""
        latency = BEGINS + (self.ranks - self.nodes) * WITHIN + (self.nodes - 1) * BETWEEN
        return bytes_ / self.link / reached + messages * latency if self.ranks > 1 else 0.0


ALONE = Ring(1, 1, 1.0)


def steps_of(request, size, **way):
    """Return the steps of all sizes of a local batch, exact for `size` samples."""
    from mpdemo.tools.plan.own_scaling import Line
    from mpdemo.tools.plan.own_step import Way

    way["compiled"] = request.compiled
    return Line(request.model, Way(**way), OPTIMIZERS[request.optimizer].states, size)


def waiting(devices) -> float:
    """Return how many times as long as a usual one the slowest of so many devices takes."""
    return 1 + UNEQUAL * (2 * log(devices)) ** 0.5


def predicted(request, precision, steps, size, parts, replicas, rings, messages, extra=0) -> Prediction:
    """Return what a way needs that computes so many `parts` of `size` samples; `extra` bytes are held besides.

    `messages` has how many bytes, and in how many messages, each collective sends, if any does, and `rings` where: a
    cast sends none.
    """
    roof, sent, times, step = request.roof(precision), 0.0, {}, steps.at(size)
    for kind, (bytes_, number) in (messages or {}).items():
        ring, halves = rings.get(kind, ALONE), HALVES[kind]
        around = halves * ((ring.ranks - 1) / ring.ranks) * bytes_
        sent += around
        times[kind] = ring.seconds(around, halves * number, request.efficiency.links)

    def most():
        size = steps.most(request.limit - extra)
        return None if size is None else size * parts * replicas

    sending, layers = sum(times.values()), max(1, len(steps.model.layers), steps.model.count)
    hidden = sending - times.get(IN_BLOCKS, 0.0)  # a block waits for its own messages
    seconds = steps.eager().at(size).seconds(roof)
    if seconds is not None:
        seconds *= parts
        seconds = max(seconds + OVERLAP * min(hidden, seconds), hidden) * waiting(request.devices)
        seconds += hidden / layers + sending - hidden
    optimizer = OPTIMIZERS[request.optimizer]
    held = step.weights + (1 + optimizer.states + optimizer.besides) * step.trained
    updating = held if optimizer.besides else 0  # else the backward pass holds as much when it ends
    flags = flags_of(steps.way, parts, replicate=replicas // steps.way.shards)
    if not steps.way.offload:
        if seconds is not None:
            seconds += update_seconds(request.optimizer, step.trained, roof, precision)
        peak = max(step.peak, updating) + extra
        return Prediction(peak, seconds, sent, sending, parts, flags, most=most)
    found = Prediction(step.peak + extra, seconds, sent, sending, parts, flags, most=most)
    loaded, stored = (parts * bytes_ for bytes_ in steps.with_host(step))
    least = max(loaded, stored) / GPUS[request.gpu].host  # both directions at once
    updating, on_host = host_of(request, step)
    seconds = seconds and max(seconds, least) + updating
    return found._replace(
        seconds=seconds, moved=loaded + stored, least=least, updating=updating, on_host=on_host
    )

"""Whether a training fits: on one device, in parts of the batch, in 16 bits, on several devices.

Sums over the footprints of the blocks; `mpdemo.plan.choose` asks a `mpdemo.plan.case.Case` these questions, in order.
Memory is what `mpdemo.plan.memory` and `mpdemo.plan.sharded_layers` describe, messages are those of
`mpdemo.plan.traffic`.
Taught in notebooks/11_which_one.ipynb.
"""

from dataclasses import dataclass, replace

from mpdemo.cuts import HEADS
from mpdemo.plan import planner, sharded_layers, traffic
from mpdemo.plan.cost import total
from mpdemo.plan.cut import balanced_cut
from mpdemo.plan.footprint import needs
from mpdemo.plan.memory import MIB, replica

MOST = planner.MOST_MICROBATCHES


@dataclass(frozen=True)
class Fit:
    """One way in which a case fits.

    Attributes
    ----------
    settings : dict
        Of ``python -m mpdemo train``, without the model and the data.
    memory : float
        Bytes on the fullest device.
    seconds : float or None
        Time of a step without messages, from the costs of the case; None where they do not say it.
    sent : float
        Bytes that the busiest device sends in a step.
    """

    settings: dict
    memory: float
    seconds: float | None = None
    sent: float = 0.0


def divisors(number):
    """Return all divisors of a number, in order."""
    return [part for part in range(1, number + 1) if number % part == 0]


def states(case):
    """Return the bytes of weights, gradients and optimizer states, which no smaller batch makes smaller."""
    one = on_one(case, 1, 1)
    return one.weights + one.gradients + one.optimizer


def on_one(case, images, parts, precision="fp32", checkpointing=False):
    """Return the memory of one device that accumulates the gradients of `images` in so many parts."""
    return replica(case.blocks(precision, checkpointing), images, parts, case.optimizer, case.devices > 1)


def replicas(case, parts=(1,), precision="fp32", checkpointing=False):
    """Return how the whole model fits on every device, each with its share of the batch, in the fewest parts; or None.

    Parameters
    ----------
    parts : sequence of int, optional
        Numbers of parts to try; None tries all.
    """
    if case.batch % case.devices or states(case) > case.limit:
        return None
    share = case.batch // case.devices
    for count in parts or divisors(share):
        used = on_one(case, share, count, precision, checkpointing).peak
        if used <= case.limit:
            sent = traffic.ring_bytes(traffic.of_replicas(case.blocks()), case.devices)
            return _fit_of_a_share(case, count, precision, checkpointing, used, sent, 1)
    return None


def _fit_of_a_share(case, parts, precision, checkpointing, memory, sent, shards) -> Fit:
    """Return the `Fit` of devices that compute all blocks for their share of the batch, in so many parts.

    Each keeps one of so many `shards` of the weights, which it updates.
    """
    settings = {"precision": precision} if precision != "fp32" else {}
    settings |= {"activation_checkpointing": True} if checkpointing else {}
    settings |= {"microbatches": parts} if parts > 1 else {}
    settings |= {"processes": case.devices} if case.devices > 1 else {}
    costs = case.costs(case.batch // case.devices // parts)
    seconds = parts * sum(cost.both + checkpointing * cost.forward for cost in costs) + case.update(shards)
    return Fit(settings, memory, None if precision == "bf16" else seconds, sent)  # the costs are for float32


def cut(case, microbatches=None, replicas=1, sharded=False):
    """Return how the model fits when it is cut over as many devices as possible; None where it does not.

    With ``microbatches=1`` one device works at a time; else 1F1B with four microbatches per device, or two, or one, or
    any other number: the first that divides the batch and fits. The case is that of one of so many `replicas`, which
    divide every stage among them where they are `sharded`.
    """
    for ranks in range(min(case.devices, len(case.blocks())), 1, -1):
        wanted = [4 * ranks, 2 * ranks, ranks, *(m for m in divisors(case.batch) if ranks < m <= MOST)]
        for count in [m for m in wanted if case.batch % m == 0] if microbatches is None else [microbatches]:
            for points in _even_cuts(case, ranks, case.batch // count):
                fit = _cut_at(case, ranks, count, points, replicas, sharded)
                if fit.memory <= case.limit:
                    return fit
    return None


def _even_cuts(case, ranks, size):
    """Return the cut with the most even times, and the one with the most even memory."""
    blocks = case.blocks()
    memory = [needs(block, size).saved + block.weights + block.gradients for block in blocks]
    return [balanced_cut([cost.both for cost in case.costs(size)], ranks), balanced_cut(memory, ranks)]


def _cut_at(case, ranks, count, points, replicas, sharded):
    blocks, size, schedule = case.blocks(), case.batch // count, "1f1b" if count > 1 else "naive"
    shards = replicas if sharded else 1
    options = {"bandwidth": float("inf"), "shards": shards, "update": case.update_per_byte}
    job = planner.Workload(blocks, {size: case.costs(size)}, ranks, case.batch, case.limit, case.optimizer, **options)
    candidate = planner.evaluate(job, schedule, count, points)
    settings = {"processes": ranks, "cut": ",".join(blocks[point - 1].name for point in points)}
    settings |= {"microbatches": count} if count > 1 else {}
    within = traffic.of_stages(blocks, points, range(ranks), case.batch)
    across = traffic.of_grid(blocks, points, range(ranks), shards, count)
    sent = max(own["send"] + traffic.ring_bytes(other, replicas) for own, other in zip(within, across, strict=True))
    return Fit(settings, max(candidate.peaks), candidate.step_time, sent)


def sharded(case, parts=(1,), checkpointing=False):
    """Return how FSDP fits, in the fewest `parts`, or None; arguments as for `replicas`.

    Each part gathers all weights again, so more than one are for the fast links inside one node.
    """
    if case.batch % case.devices or (parts is None and case.nodes > 1):
        return None
    blocks, share = case.blocks(checkpointing=checkpointing), case.batch // case.devices
    for count in parts or divisors(share):
        memory = sharded_layers.device(blocks, share, case.optimizer, parts=count, shards=case.devices).peak
        if memory <= case.limit:
            sent = traffic.ring_bytes(traffic.of_shards(blocks, case.devices, count), case.devices)
            return _fit_of_a_share(case, count, "fp32", checkpointing, memory, sent, case.devices)
    return None


def split_layers(case):
    """Return how tensor parallelism inside one node fits."""
    if case.nodes > 1 or case.model != "transformer" or HEADS % case.devices:
        return None
    blocks = case.blocks()
    memory = sharded_layers.device(blocks, case.batch, case.optimizer, splits=case.devices).peak
    if memory > case.limit:
        return None
    seconds = total(case.costs(case.batch)) / case.devices + case.update(case.devices)
    sent = traffic.ring_bytes(traffic.of_split_layers(blocks, case.batch), case.devices)
    return Fit({"processes": case.devices}, memory, seconds, sent)


def replicas_of_a_cut(case, sharded=False):
    """Return how several replicas fit, each cut over the fewest devices, perhaps sharded; None where they do not."""
    for stages in [n for n in divisors(case.devices)[1:-1] if case.batch % (case.devices // n) == 0]:
        replicas = case.devices // stages
        fit = cut(replace(case, devices=stages, batch=case.batch // replicas), None, replicas, sharded)
        if fit and fit.settings["processes"] == stages:
            grid = {"processes": case.devices, "replicas": replicas} | ({"sharded": True} if sharded else {})
            return replace(fit, settings=fit.settings | grid)
    return None


def mib(number):
    """Return bytes as text, in MiB."""
    return f"{number / MIB:,.0f} MiB"

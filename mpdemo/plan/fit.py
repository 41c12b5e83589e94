"""The ways in which a case may fit: on one device, in parts of the batch, in 16 bits, on several devices.

`mpdemo.plan.choose` asks these questions in order. Each answer is a dry run of the rung with the first settings that
fit; where none fit, with those that need least. Taught in notebooks/11_which_one.ipynb.
"""

from dataclasses import replace

from mpdemo.cuts import HEADS
from mpdemo.plan.case import Fit, counted, each_stage
from mpdemo.plan.planner import balanced_cut, evaluate
from mpdemo.rules import batch_norm
from mpdemo.schedules import divisors

MOST_MICROBATCHES = 64
TRIED = 3  # cuts that are dry-run: the first ones that fit by a sum over the blocks


def first_that_fits(case, find, numbers) -> Fit:
    """Return `find` of the first number that fits, or of the one that needs least; larger numbers need less memory."""
    first = find(numbers[0])
    if first.memory <= case.limit or len(numbers) == 1:
        return first
    last = find(numbers[-1])
    if last.memory > case.limit:
        return min(first, last, key=lambda fit: fit.memory)
    return next(fit for fit in map(find, numbers[1:]) if fit.memory <= case.limit)


def replicas(case, parts=(1,), **saving):
    """Return how the whole model fits on every device, each with its share of the batch; None where it cannot.

    `parts` are the numbers of parts to try; None tries all.
    """
    return _of_shares(case, "ddp" if case.devices > 1 else "single", parts, saving)


def sharded(case, parts=(1,), **saving):
    """Return how FSDP fits; arguments as for `replicas`.

    Each part gathers all weights again, so more than one are for the fast links inside one node.
    """
    if saving.get("precision") == "bf16" and isinstance(case.model, str) and batch_norm(case.model, case.norm):
        return None  # its averages stay in float32
    return None if parts is None and case.nodes > 1 else _of_shares(case, "fsdp", parts, saving)


def _of_shares(case, rung, parts, saving):
    """Return how devices fit that compute all blocks for their share of the batch."""
    if case.batch % case.devices:
        return None
    share, processes = case.batch // case.devices, {"processes": case.devices} if case.devices > 1 else {}
    precision, twice = saving.get("precision", "fp32"), saving.get("activation_checkpointing", False)

    def find(count):
        memory, sent = counted(case, rung, microbatches=count, **saving)
        settings = saving | ({"microbatches": count} if count > 1 else {}) | processes
        seconds = count * sum(cost.both + twice * cost.forward for cost in case.costs(share // count, precision))
        return Fit(settings, memory, seconds or None, sent)

    return first_that_fits(case, find, parts or divisors(share))


def split_layers(case):
    """Return how tensor parallelism inside one node fits."""
    if case.nodes > 1 or case.model != "transformer" or HEADS % case.devices:
        return None
    memory, sent = counted(case, "tensor")
    return Fit({"processes": case.devices}, memory, case.one_device_seconds / case.devices, sent)


def cut(case, microbatches=None, replicas=None, sharded=False):
    """Return how the model fits when it is cut over as many devices as possible; None where it cannot be cut.

    With ``microbatches=1`` one device works at a time; else 1F1B with four microbatches per device, or two, or one, or
    any other number that divides the batch. The case is that of one of so many `replicas`, which divide every stage
    among them where they are `sharded`.
    """
    ways, shards = [], replicas if sharded else 1
    for ranks in range(min(case.devices, len(case.blocks())), 1, -1) if replicas is None else [case.devices]:
        fewer = replace(case, devices=ranks)
        wanted = dict.fromkeys((4 * ranks, 2 * ranks, ranks, *range(ranks + 1, MOST_MICROBATCHES + 1)))
        for count in [m for m in wanted if case.batch % m == 0] if microbatches is None else [microbatches]:
            schedule = "1F1B" if count > 1 else "GPipe"
            for points in _even_cuts(fewer, case.batch // count):
                ways.append((fewer, evaluate(fewer, schedule, count, points, shards, bandwidth=float("inf"))))
        if any(max(candidate.peaks) <= case.limit for _, candidate in ways):
            break  # fewer devices are for a model that more do not hold
    least = [min(ways, key=lambda way: max(way[1].peaks))] if ways else []
    fits = []
    for fewer, candidate in [way for way in ways if max(way[1].peaks) <= 1.05 * case.limit][:TRIED] or least:
        fits.append(_cut_at(fewer, candidate, replicas, sharded))
        if fits[-1].memory <= case.limit:
            break
    return min(fits, key=lambda fit: (fit.memory > case.limit, fit.memory), default=None)


def _even_cuts(case, size):
    """Return the cut with the most even times, and the one with the most even memory."""
    blocks = case.blocks()
    if len(blocks) < case.devices:
        return []
    memory = [block.bytes("saved", size) + block.weights + block.gradients for block in blocks]
    return [balanced_cut(values, case.devices) for values in ([cost.both for cost in case.costs(size)], memory)]


def _cut_at(case, candidate, replicas, sharded):
    """Dry-run the fullest device of a cut; of a pipeline all devices."""
    count, peaks = candidate.microbatches, candidate.peaks
    cut = ",".join(case.blocks()[point - 1].name for point in candidate.points)
    how = {"schedule": candidate.schedule, "microbatches": count, "cut": cut}
    settings = {"processes": case.devices * (replicas or 1), "cut": cut}
    settings |= {"microbatches": count} if count > 1 else {}
    settings |= {"replicas": replicas} if replicas else {}
    settings |= {"sharded": True} if sharded else {}
    rung = "hybrid" if replicas else "pipeline" if count > 1 else "model_parallel"
    whole = replace(case, batch=case.batch * (replicas or 1))
    memory, sent = counted(whole, rung, peaks.index(max(peaks)), replicas, **how, sharded=sharded)
    if rung != "pipeline":
        return Fit(settings, memory, candidate.step_time, sent)
    stages = tuple(device.peak for device in each_stage(case, **how))
    return Fit(settings, max(stages), candidate.step_time, sent, stages)


def replicas_of_a_cut(case, sharded=False):
    """Return how several replicas fit, each cut over the fewest devices, perhaps sharded; None where it cannot be."""
    best = None
    for stages in [n for n in divisors(case.devices)[1:-1] if case.batch % (case.devices // n) == 0]:
        count = case.devices // stages
        found = cut(replace(case, devices=stages, batch=case.batch // count), None, count, sharded)
        if found and found.memory <= case.limit:
            return found
        best = min(filter(None, (best, found)), key=lambda fit: fit.memory, default=None)
    return best

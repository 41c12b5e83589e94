"""The ways in which a request may fit: on one device, in parts of the batch, in 16 bits, on several devices.

`mpdemo.tools.plan.choose` asks these questions in order. Each answer is a dry run of the rung with the first settings
that fit; where none fit, with those that need least. Taught in notebooks/12_which_one.ipynb.
"""

from dataclasses import replace

from mpdemo.predict.planner import balanced_cut, evaluate
from mpdemo.predict.request import STATES, Prediction, settled
from mpdemo.settings.cuts import HEADS
from mpdemo.settings.rules import CUT_RUNGS, batch_norm
from mpdemo.settings.schedules import divisors

MOST_MICROBATCHES = 64
STAGES_SHOWN = 8  # of a longer pipeline only the fullest device is dry-run: its row stays readable, and a plan quick
TRIED = 3  # cuts that are dry-run: the first ones that fit by a sum over the blocks
IN_BLOCKS = "all-reduce in blocks"  # of tensor parallelism: a kind of message of its own, on another link
# An all-reduce is an all-gather and a reduce-scatter; a broadcast goes round the ring once.
HALVES = {"all-reduce": 2, IN_BLOCKS: 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}


def first_that_fits(request, find, numbers) -> Prediction:
    """Return `find` of the first number that fits, or of the one that needs least; larger numbers need less memory."""
    first = find(numbers[0])
    if first.memory <= request.limit or len(numbers) == 1:
        return first
    last = find(numbers[-1])
    if last.memory > request.limit:
        return min(first, last, key=lambda found: found.memory)
    return next(found for found in map(find, numbers[1:]) if found.memory <= request.limit)


def replicas(request, parts=None, **way):
    """Return how the whole model fits on every device, each with its share of the batch; None where it cannot.

    `parts` are the numbers of parts to try, None tries all; `way` says whether it is ``bf16`` or ``checkpointing``.
    """
    return _of_shares(request, "ddp" if request.devices > 1 else "single", parts, **way)


def sharded(request, parts=(1,), **way):
    """Return how FSDP fits; arguments as for `replicas`.

    Each part gathers all weights again, so more than one are for the fast links inside one node.
    """
    if way.get("bf16") and batch_norm(request.model, request.norm):
        return None  # its averages stay in float32
    return None if parts is None and request.nodes > 1 else _of_shares(request, "fsdp", parts, **way)


def _of_shares(request, rung, parts, bf16=False, checkpointing=False):
    """Return how devices fit that compute all blocks for their share of the batch."""
    if request.batch % request.devices:
        return None
    share = request.batch // request.devices
    saving = {"precision": "bf16"} if bf16 else {}
    if checkpointing:
        saving["activation_checkpointing"] = True

    def find(count):
        memory, sent = counted(request, rung, microbatches=count, **saving)
        settings = saving | ({"microbatches": count} if count > 1 else {})
        if request.devices > 1:
            settings["processes"] = request.devices
        costs = request.costs(share // count, "bf16" if bf16 else "fp32")
        seconds = count * sum(cost.both + checkpointing * cost.forward for cost in costs)
        return Prediction(settings, memory, seconds or None, sent)

    return first_that_fits(request, find, parts or divisors(share))


def split_layers(request):
    """Return how tensor parallelism inside one node fits."""
    if request.nodes > 1 or request.model != "transformer" or HEADS % request.devices:
        return None
    memory, sent = counted(request, "tensor")
    return Prediction({"processes": request.devices}, memory, request.one_device_seconds / request.devices, sent)


def cut(request, microbatches=None, replicas=None, sharded=False):
    """Return how the model fits when it is cut over as many devices as possible; None where it cannot be cut.

    With ``microbatches=1`` one device works at a time; else 1F1B with four microbatches per device, or two, or one, or
    any other number that divides the batch. The request is that of one of so many `replicas`, which divide every stage
    among them where they are `sharded`.
    """
    ways, shards = [], replicas if sharded else 1
    for ranks in range(min(request.devices, len(request.blocks())), 1, -1) if replicas is None else [request.devices]:
        fewer = replace(request, devices=ranks)
        wanted = dict.fromkeys((4 * ranks, 2 * ranks, ranks, *range(ranks + 1, MOST_MICROBATCHES + 1)))
        for count in [m for m in wanted if request.batch % m == 0] if microbatches is None else [microbatches]:
            schedule = "1F1B" if count > 1 else "GPipe"
            for points in _even_cuts(fewer, request.batch // count):
                ways.append((fewer, evaluate(fewer, schedule, count, points, shards, bandwidth=float("inf"))))
        if any(max(candidate.peaks) <= request.limit for _, candidate in ways):
            break  # fewer devices are for a model that more do not hold
    least = [min(ways, key=lambda way: max(way[1].peaks))] if ways else []
    fits = []
    for fewer, candidate in [way for way in ways if max(way[1].peaks) <= 1.05 * request.limit][:TRIED] or least:
        fits.append(_cut_at(fewer, candidate, replicas, sharded))
        if fits[-1].memory <= request.limit:
            break
    return min(fits, key=lambda found: (found.memory > request.limit, found.memory), default=None)


def _even_cuts(request, size):
    """Return the cut with the most even times, and the one with the most even memory."""
    blocks = request.blocks()
    if len(blocks) < request.devices:
        return []
    memory = [block.bytes("saved", size) + block.weights + block.gradients for block in blocks]
    return [balanced_cut(values, request.devices) for values in ([cost.both for cost in request.costs(size)], memory)]


def _cut_at(request, candidate, replicas, sharded):
    """Dry-run the fullest device of a cut; of a pipeline with few stages all devices."""
    count, peaks = candidate.simulation.microbatches, candidate.peaks
    cut = ",".join(request.blocks()[point - 1].name for point in candidate.points)
    how = {"schedule": candidate.simulation.schedule, "microbatches": count, "cut": cut}
    settings = {"processes": request.devices * (replicas or 1), "cut": cut}
    if count > 1:
        settings["microbatches"] = count
    if replicas:
        settings["replicas"] = replicas
    if sharded:
        settings["sharded"] = True
    rung = "hybrid" if replicas else "pipeline" if count > 1 else "model_parallel"
    of_all = replace(request, batch=request.batch * (replicas or 1))
    memory, sent = counted(of_all, rung, peaks.index(max(peaks)), replicas, **how, sharded=sharded)
    if rung != "pipeline" or request.devices > STAGES_SHOWN:
        return Prediction(settings, memory, candidate.step_time, sent)
    stages = tuple(device.peak for device in each_stage(request, **how))
    return Prediction(settings, max(stages), candidate.step_time, sent, stages)


def replicas_of_a_cut(request, sharded=False):
    """Return how several replicas fit, each cut over the fewest devices, perhaps sharded; None where it cannot be."""
    best = None
    for stages in [n for n in divisors(request.devices)[1:-1] if request.batch % (request.devices // n) == 0]:
        count = request.devices // stages
        found = cut(replace(request, devices=stages, batch=request.batch // count), None, count, sharded)
        if found and found.memory <= request.limit:
            return found
        best = min(filter(None, (best, found)), key=lambda found: found.memory, default=None)
    return best


def counted(request, rung, rank=0, replicas=None, **settings):
    """Dry-run one rank of a rung: return its peak memory and the bytes that it sends."""
    from mpdemo.predict import memory

    s = settled(request.spec, rung, request.batch, request.devices, replicas, **settings)
    states = STATES[request.optimizer]
    if rung in CUT_RUNGS:
        found = memory.of_rank(request.spec, s, rank, states)
    else:
        found = memory.processes(request.spec, s, states)[0]
    return found.devices[0].peak, ring_bytes(found.messages, replicas or s.devices)


def each_stage(request, schedule, microbatches, cut) -> list:
    """Dry-run every rank of a pipeline: return the `DeviceMemory` of each device."""
    from mpdemo.predict import memory

    options = {"schedule": schedule, "microbatches": microbatches, "cut": cut}
    s = settled(request.spec, "pipeline", request.batch, request.devices, **options)
    return [rank.devices[0] for rank in memory.processes(request.spec, s, STATES[request.optimizer])]


def ring_bytes(messages, ranks) -> float:
    """Return the bytes that each of `ranks` devices sends, with collectives that go round a ring.

    `messages` are those of `mpdemo.predict.memory.Counted`: the whole tensor that is reduced, or that all parts make.
    """
    share = (ranks - 1) / ranks
    return sum(HALVES[kind] * share * size if kind in HALVES else size for kind, size in messages.items())

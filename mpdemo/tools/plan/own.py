"""Every way to train a model: on one device, replicated, sharded, with its layers split, or in stages.

A way is a mesh, a precision, and what is computed twice. Each answer comes from a step that is computed on fake tensors
(own_step.py); where there is none, `NotPlanned` says why. Taught in notebooks/72_which_one.ipynb.
"""

from dataclasses import replace
from functools import partial

from mpdemo.settings.schedules import divisors
from mpdemo.tools.plan.efficiency import AT_BEST
from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.own_prediction import Ring, predicted, steps_of, waiting
from mpdemo.tools.plan.request import (
    IN_BLOCKS,
    NotPlanned,
    Prediction,
    Rule,
    first_that_fits,
    flags_of,
    local_batch,
    mib,
)
from mpdemo.tools.plan.roof import OPTIMIZERS, roof, update_seconds
from mpdemo.tools.plan.split import balanced_cut, stage_slices

# What is computed twice -> the options of the finder: nothing, all that lies between products, all of a block.
RECOMPUTED, PARTLY = ", recomputed", ", partly recomputed"
AGAIN = {"": {}, RECOMPUTED: {"checkpointing": True}, PARTLY: {"checkpointing": True, "selective": True}}
RANK = 16  # of LoRA's adapters
BUCKET = 25 * 2**20  # bytes of DDP's messages
STAGES_SHOWN = 8  # a longer pipeline's row has the memory of its fullest stage alone


def rules_of(request) -> list[Rule]:
    """Return all ways of a request: the meshes, each in every precision, recomputed or not."""
    return [
        Rule(mesh, precision, again, why, partial(find, precision=precision, **AGAIN[again]))
        for mesh, why, find in _meshes(request)
        for precision in request.precisions[: 1 if "LoRA" in mesh else None]  # whose weights are in 16 bits
        for again in AGAIN
    ]


def _meshes(request):
    """Yield the name of each mesh, why it fits, and what finds how."""
    several, name = request.devices > 1, "ddp" if request.devices > 1 else "single"
    holds = "Each of {devices} devices" if several else "One device"
    yield name, f"{holds} holds the whole model", replicated
    if request.nodes > 1:
        yield "hsdp", "Every node holds the model, sharded over its devices", partial(sharded, hsdp=True)
    if several:
        yield "fsdp", "Weights, gradients and states are sharded over {devices} devices", sharded
        yield "tensor", "All devices split the Linears of every block", split_layers
        why = "Devices of a node split the Linears of every block, and shard the model with all the others"
        yield "fsdp x tensor", why, sharded_and_split
        yield "pipeline", "The blocks are spread over {devices} devices", pipeline
    why = "Weights, gradients and states are in the host's memory"
    yield f"{'fsdp' if several else name}, offload", why, partial(sharded, offload=True)
    if request.model.all_trained:
        why = f"Only LoRA's adapters of rank {RANK} are trained, beside frozen weights in bf16"
        yield f"{name}, LoRA", why, partial(replicated, rank=RANK)


def half_of(precision) -> str:
    """Return how a step computes in 16 bits, if it does."""
    return {"fp16": "autocast", "fp32": "", "tf32": ""}.get(precision, precision)


def replicated(request, precision="fp32", parts=None, **way):
    """Return how the whole model fits on every device; `parts` are numbers of microbatches to try, None tries all."""
    share, devices, half = local_batch(request, request.devices), request.devices, half_of(precision)
    if request.states() > request.limit and not (way.get("rank") or request.everything):
        raise NotPlanned(
            f"weights, gradients and states alone need {mib(request.states())} of {mib(request.limit)}"
        )
    ring = Ring(devices, request.nodes, request.link(devices // request.nodes))
    # PyTorch's replicate, which casts as FSDP does; DDP has the gradients once more, in its buckets, unless
    # gradient_as_bucket_view=True makes them one
    copies = devices if half == "bf16" and not way.get("rank") else 1
    way |= {"half": half, "copies": copies}
    rings = {"all-reduce": ring, "broadcast": ring}

    def find(count):
        steps = steps_of(request, share, held=count > 1, **way)
        step, extra = steps.at(share // count), 0
        sent = step.sent if copies > 1 else None
        if devices > copies:
            extra = step.trained
            sent = {"all-reduce": (extra, -(-extra // BUCKET)), "broadcast": (step.buffers, 1)}
        return predicted(request, precision, steps, share // count, count, devices, rings, sent, extra)

    return first_that_fits(request, find, parts or divisors(share))


def sharded(request, precision="fp32", parts=None, hsdp=False, tensor=1, **way):
    """Return how FSDP fits, in several nodes as HSDP if asked for; `tensor` devices of a node split the layers.

    Every microbatch gathers the weights and reduce-scatters the gradients, so that these stay sharded. In several nodes
    it would send all weights between them, so the batch is computed at once.
    """
    per_node, nodes = request.devices // request.nodes, request.nodes
    parts = parts or ((1,) if nodes > 1 else None)
    replicas = request.devices // tensor
    share, copies = local_batch(request, replicas), nodes if hsdp else 1
    sheet, shards = GPUS[request.gpu], replicas // copies
    ring = Ring(shards, 1, sheet.link) if hsdp else Ring(shards, nodes, request.link(per_node // tensor))
    rings = dict.fromkeys(("all-gather", "reduce-scatter"), ring) | {IN_BLOCKS: Ring(tensor, 1, sheet.link)}
    rings |= dict.fromkeys(("all-reduce", "broadcast"), Ring(copies, copies, sheet.between))
    if hsdp and per_node == 1:
        raise NotPlanned("a node has one device, so there is nothing to shard within it")
    way |= {"half": half_of(precision), "shards": shards, "copies": copies, "tensor": tensor}

    def find(count):
        steps = steps_of(request, share, held=count > 1, **way)
        sent = {kind: count * each for kind, each in steps.at(share // count).sent.items()}
        return predicted(request, precision, steps, share // count, count, replicas, rings, sent)

    return first_that_fits(request, find, parts or divisors(share))


def split_layers(request, precision="fp32", parts=(1,), **way):
    """Return how tensor parallelism over all devices fits, which compute the same samples."""
    if request.nodes > 1:
        raise NotPlanned("every block would send its activations between the nodes")
    size, half = request.batch // parts[0], half_of(precision)
    steps = steps_of(request, size, tensor=request.devices, half=half, held=parts[0] > 1, **way)
    rings = {IN_BLOCKS: Ring(request.devices, 1, request.link(request.devices))}
    sent = {kind: parts[0] * each for kind, each in steps.at(size).sent.items()}
    return predicted(request, precision, steps, size, parts[0], 1, rings, sent)


def sharded_and_split(request, **way):
    """Return how FSDP over tensor parallelism fits: with the fewest devices of a node that split the layers."""
    per_node = request.devices // request.nodes
    found, reason = [], NotPlanned("it takes at least four devices, two of them in a node")
    for tensor in [n for n in divisors(per_node)[1:] if n < request.devices]:
        try:
            found.append(sharded(request, tensor=tensor, parts=(1,), **way))
        except NotPlanned as error:
            reason = error
        if found and found[-1].memory <= request.limit:
            return found[-1]
    if not found:
        raise reason
    return min(found, key=lambda f: f.memory)


def pipeline(request, precision="fp32", **way):
    """Return how the blocks fit in stages, one for each device, with 1F1B.

    Stages hold what the phases of a step of the whole model tell of each block; no stage is computed by itself.
    """
    model, ranks = request.model, request.devices
    if not model.few and not model.chain:
        raise NotPlanned(
            "it has no list of more than five equal blocks, of which it also computes with fewer"
        )
    if model.count < ranks:
        what = "layers" if model.chain else "equal blocks"
        raise NotPlanned(f"its {model.count} {what} are fewer than the devices")
    counts = [count for count in (4 * ranks, 2 * ranks, ranks) if request.batch % count == 0]
    if not counts:
        raise NotPlanned(f"a batch of {request.batch} does not divide into {ranks} microbatches")
    half = half_of(precision)
    find = partial(_stages, request, precision, way | {"half": half, "held": True, "stage": half == "bf16"})
    return first_that_fits(request, find, counts)


def _stages(request, precision, way, microbatches):
    """Return what the fullest device of a pipeline needs, whose stages take equally long as far as blocks allow.

    In bf16 a stage keeps copies of its weights. To cast them, once in a step, is left out: a hundredth of its time.
    """
    from mpdemo.tools.plan import own_scaling

    size, ranks, limits = request.batch // microbatches, request.devices, request.roof(precision)
    steps = steps_of(request, size, **way)
    chain = own_scaling.chain(steps, size, limits)
    if steps.way.stage:
        chain = [part._replace(weights=1.5 * part.weights) for part in chain]
    slices = cut(chain, ranks)
    in_flight = [min(ranks - rank, microbatches) for rank in range(ranks)]
    crossing = [0, *(chain[stop - 1].crossing for _, stop in slices[:-1]), 0]
    # PyTorch's stages have a place for each microbatch's activations and gradients that they will receive.
    received = [microbatches * (crossing[rank] + crossing[rank + 1]) for rank in range(ranks)]
    peaks = stage_peaks(request, chain, slices, in_flight, received)
    timed = all(part.seconds is not None for part in chain)
    times = [sum(part.seconds for part in chain[start:stop]) for start, stop in slices] if timed else [0]
    # In the middle: activations to the next stage, gradients to the one before.
    sent = 2 * microbatches * max(crossing)
    shown = tuple(peaks) if ranks <= STAGES_SHOWN else ()
    ring = Ring(2, min(2, request.nodes), request.link(1))
    sending = ring.seconds(sent, 2 * microbatches, request.efficiency.links)
    trained = max(sum(part.trained for part in chain[start:stop]) for start, stop in slices)
    updating = update_seconds(request.optimizer, trained, limits, precision)
    computing = (microbatches + ranks - 1) * max(times) * waiting(ranks)  # 1F1B of equal stages
    seconds = computing + sending + updating if timed else None
    flags = flags_of(steps.way, microbatches, pp=ranks)
    return Prediction(max(peaks), seconds, sent, sending, microbatches, flags, shown)


def stage_peaks(request, chain, slices, in_flight, received) -> list:
    """Return the bytes at the peak of each stage of a chain of parts.

    Each has so many microbatches in flight, and bytes that it received.
    """
    peaks = []
    for (start, stop), count, places in zip(slices, in_flight, received, strict=True):
        stage = chain[start:stop]
        states = 1 + OPTIMIZERS[request.optimizer].states
        held = sum(part.weights + states * part.trained for part in stage)
        saved = sum(part.saved for part in stage)
        peaks.append(held + places + count * saved + max(part.extra for part in stage))
    return peaks


def cut(chain, ranks) -> list:
    """Return where the stages of a chain of parts begin and end, which take equally long as far as parts allow."""
    timed = all(part.seconds is not None for part in chain)
    return stage_slices(
        balanced_cut([part.seconds if timed else part.weights for part in chain], ranks), len(chain)
    )


def one_device(request, precision) -> tuple:
    """Return the seconds of a step on one device that had room for the whole batch, and those of its products at peak.

    None and None where they are not known.
    """
    half, limits, eager = half_of(precision), request.roof(precision), replace(request, compiled=False)
    # of other precisions DDP's row has counted a step of each device's part
    size = request.batch if half == "bf16" else max(1, request.batch // request.devices)
    try:
        step = steps_of(eager, size, half=half).at(request.batch)
    except NotPlanned:
        return None, None
    computing = step.seconds(limits)
    at_peak = roof(request.gpu, AT_BEST, precision == "tf32")._replace(moved=float("inf"), launch=0.0)
    whole = computing and computing + update_seconds(request.optimizer, step.trained, limits, precision)
    return whole, step.seconds(at_peak)


def with_times(request, find) -> Prediction:
    """Return what `find` finds, with its time compiled, and between which times it may be.

    The least is that of the fastest kernels, fused; the most that of the slowest ones, which are fused only by
    torch.compile.
    """
    found, known = find(request), request.efficiency
    if found.seconds is None:
        return found

    def seconds(efficiency):
        return float(find(replace(request, efficiency=efficiency)).seconds)

    slow = known.fused() if request.compiled else known
    between = seconds(known.fused().at_the_end(1)), seconds(slow.at_the_end(-1))
    return found._replace(compiled=seconds(known.fused()), between=between if any(known.spreads) else ())

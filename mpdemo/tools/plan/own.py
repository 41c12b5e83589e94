"""Every way to train a model: on one device, replicated, sharded, with its layers split, or in stages.

Each answer comes from a step that is computed on fake tensors (own_step.py); where there is none, `NotPlanned` says
why. Taught in notebooks/72_which_one.ipynb.
"""

from dataclasses import replace
from functools import partial

from mpdemo.settings.schedules import divisors
from mpdemo.tools.plan.efficiency import AT_BEST
from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.own_prediction import predicted, steps_of
from mpdemo.tools.plan.request import (
    ACCUMULATION,
    ALL,
    BOTH,
    CHECKPOINTING,
    IN_BLOCKS,
    OFFLOAD,
    SELECTIVE,
    NotNeeded,
    NotPlanned,
    Prediction,
    Rule,
    first_that_fits,
    flags_of,
    local_batch,
    rules,
)
from mpdemo.tools.plan.roof import STATES, roof, update_seconds
from mpdemo.tools.plan.split import balanced_cut, stage_slices

WIDEST = 0.25  # of the interval of a step time, to either side
LORA = 16  # rank of the adapters
STAGES_SHOWN = 8  # a longer pipeline's row has the memory of its fullest stage alone


def rules_of(request) -> list[Rule]:
    """Return the rules for a request, in the order in which their answers are preferred."""
    per_node = request.devices // request.nodes
    several = request.devices > 1
    ways = "", ACCUMULATION, ", bf16", CHECKPOINTING, BOTH
    name, holds = ("ddp", "Each of {devices} devices holds") if several else ("single", "One device holds")
    why = f"{holds} the whole model, and its local batch fits"
    found = rules(name, why, replicated, ways) + rules(
        name, why, partial(selective, replicated), (SELECTIVE,)
    )
    if request.nodes > 1:
        why = f"Every node holds the model, sharded over its {per_node} devices, and the local batch fits"
        within = partial(sharded, hsdp=True)
        found += rules("hsdp", why, within, ("", ", bf16", BOTH))
        found += rules("hsdp", why, partial(selective, within), (SELECTIVE,))
    if several:
        why = "Weights, gradients and states are sharded over {devices} devices, and the local batch fits"
        found += rules("fsdp", why, sharded, ("", ", bf16", BOTH, ACCUMULATION))
        found += rules("fsdp", why, partial(selective, sharded), (SELECTIVE,))
        found += rules("fsdp", why, sharded_in_parts, (ALL,))
        why = "All devices split the Linears of every block, and the batch fits"
        found += rules("tensor", why, split_layers, ("", BOTH))
        why = "Devices of a node split the Linears of every block, and shard the model with all the others,"
        found += rules("fsdp x tensor", f"{why} and the local batch fits", sharded_and_split, (BOTH,))
        why = "The blocks are spread over {devices} devices, and {parts} microbatches fit"
        found += rules("pipeline", why, pipeline, ("", BOTH))
    why = "A device holds what it computes with, and the local batch fits"
    found += rules("fsdp" if several else name, why, offloaded, (OFFLOAD,))
    if request.model.all_trained:
        why = f"Only LoRA's adapters of rank {LORA} are trained, beside frozen weights in bf16, "
        why += "and the local batch fits"
        found += rules(f"{name}, LoRA", why, partial(replicated, rank=LORA), (BOTH,))
    return found


def replicated(request, parts=None, **way):
    """Return how the whole model fits on every device; `parts` are numbers of microbatches to try, None tries all."""
    share, devices = local_batch(request, request.devices), request.devices

    def find(count):
        steps = steps_of(request, share, held=count > 1, **way)
        step, used = steps.at(share // count), {}
        if devices > 1:
            link = request.link(devices // request.nodes)
            used = {"all-reduce": (devices, link), "broadcast": (devices, link)}
            # DDP's buckets: the gradients once more, unless gradient_as_bucket_view=True makes them one.
            step = step._replace(sent={"all-reduce": step.trained, "broadcast": step.buffers})
        return predicted(
            request, steps, step, count, devices, used, extra=step.trained if devices > 1 else 0
        )

    return first_that_fits(request, find, parts or divisors(share))


def sharded(request, parts=(1,), hsdp=False, tensor=1, **way):
    """Return how FSDP fits, in several nodes as HSDP if asked for; `tensor` devices of a node split the layers.

    Every microbatch gathers the weights and reduce-scatters the gradients, so that these stay sharded.
    """
    sheet, per_node = GPUS[request.gpu], request.devices // request.nodes
    if parts is None and request.nodes > 1:
        raise NotPlanned("every microbatch would send all weights between the nodes")
    replicas = request.devices // tensor
    share, copies = local_batch(request, replicas), request.nodes if hsdp else 1
    shards = replicas // copies
    link = sheet.link if hsdp else request.link(per_node // tensor)
    used = dict.fromkeys(("all-gather", "reduce-scatter"), (shards, link))
    used |= dict.fromkeys(("all-reduce", "broadcast"), (copies, sheet.between)) | {
        IN_BLOCKS: (tensor, sheet.link)
    }
    if hsdp and per_node == 1:
        raise NotPlanned("a node has one device, so there is nothing to shard within it")

    def find(count):
        way_of_it = way | {"shards": shards, "copies": copies, "tensor": tensor, "held": count > 1}
        steps = steps_of(request, share, **way_of_it)
        step = steps.at(share // count)
        step = step._replace(sent={kind: count * bytes_ for kind, bytes_ in step.sent.items()})
        return predicted(request, steps, step, count, replicas, used)

    return first_that_fits(request, find, parts or divisors(share))


def sharded_in_parts(request, **way):
    """Return how FSDP fits with gradient accumulation besides, where it does not fit at once."""
    if sharded(request, **way).memory <= request.limit:
        raise NotNeeded("it fits without gradient accumulation")
    return sharded(request, parts=None, **way)


def selective(find, request, **way):
    """Return how selective activation checkpointing fits, where it does and a faster way does not."""
    faster, smaller = ({"bf16": True, "checkpointing": again} for again in (False, True))
    if find(request, **faster).memory > request.limit >= find(request, **smaller).memory:
        found = find(request, **way)
        if found.memory <= request.limit:
            return found
    raise NotNeeded("it does not fit, or it fits without")


def offloaded(request, **way):
    """Return how FSDP fits, over one device or all, that keeps in the host's memory what no layer computes with."""
    return sharded(request, parts=None if request.nodes == 1 else (1,), **way)


def split_layers(request, parts=(1,), **way):
    """Return how tensor parallelism over all devices fits, which compute the same samples."""
    if request.nodes > 1:
        raise NotPlanned("every block would send its activations between the nodes")
    steps = steps_of(request, request.batch, tensor=request.devices, **way)
    used = {IN_BLOCKS: (request.devices, request.link(request.devices))}
    return predicted(request, steps, steps.at(request.batch), 1, 1, used)


def sharded_and_split(request, **way):
    """Return how FSDP over tensor parallelism fits: with the fewest devices of a node that split the layers."""
    per_node = request.devices // request.nodes
    found, reason = [], NotPlanned("it takes at least four devices, two of them in a node")
    for tensor in [n for n in divisors(per_node)[1:] if n < request.devices]:
        try:
            found.append(sharded(request, tensor=tensor, **way))
        except NotPlanned as error:
            reason = error
        if found and found[-1].memory <= request.limit:
            return found[-1]
    if not found:
        raise reason
    return min(found, key=lambda f: f.memory)


def pipeline(request, parts=None, **way):
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
    found = []
    for count in counts:
        found.append(_stages(request, count, **way))
        if found[-1].memory <= request.limit:
            return found[-1]
    return min(found, key=lambda f: f.memory)


def _stages(request, microbatches, **way):
    """Return what the fullest device of a pipeline needs, whose stages take equally long as far as blocks allow."""
    from mpdemo.tools.plan import own_scaling

    size, ranks = request.batch // microbatches, request.devices
    steps = steps_of(request, size, held=True, **way)
    chain = own_scaling.chain(steps, size, request.roof)
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
    sending, flags = sent / request.link(1), flags_of(steps.way, microbatches, pp=ranks)
    trained = max(sum(part.trained for part in chain[start:stop]) for start, stop in slices)
    updating = update_seconds(request.optimizer, trained, request.roof)
    computing = (microbatches + ranks - 1) * max(times) / request.several  # 1F1B of equal stages
    seconds = computing + sending + updating if timed else None
    return Prediction(max(peaks), seconds, sent, sending, microbatches, flags, shown)


def stage_peaks(request, chain, slices, in_flight, received) -> list:
    """Return the bytes at the peak of each stage of a chain of parts.

    Each has so many microbatches in flight, and bytes that it received.
    """
    peaks = []
    for (start, stop), count, places in zip(slices, in_flight, received, strict=True):
        stage = chain[start:stop]
        held = sum(part.weights + (1 + STATES[request.optimizer]) * part.trained for part in stage)
        saved = sum(part.saved for part in stage)
        peaks.append(held + places + count * saved + max(part.extra for part in stage))
    return peaks


def cut(chain, ranks) -> list:
    """Return where the stages of a chain of parts begin and end, which take equally long as far as parts allow."""
    timed = all(part.seconds is not None for part in chain)
    return stage_slices(
        balanced_cut([part.seconds if timed else part.weights for part in chain], ranks), len(chain)
    )


def one_device(request, bf16) -> tuple:
    """Return the seconds of a step on one device that had room for the whole batch, and those of its products at peak.

    None and None where they are not known. The kernels are as slow as on several devices, since what is known of these
    is published, and of other software.
    """
    try:
        step = steps_of(request, max(1, request.batch // request.devices), bf16=bf16).at(request.batch)
    except NotPlanned:
        return None, None
    computing, updating = (
        step.seconds(request.roof),
        update_seconds(request.optimizer, step.trained, request.roof),
    )
    at_peak = step.seconds(roof(request.gpu, AT_BEST)._replace(moved=float("inf"), launch=0.0))
    return None if computing is None else computing / request.several + updating, at_peak


def with_spread(request, find) -> Prediction:
    """Return what `find` finds, and how far its time may be off if all kernels are as slow as some were."""
    found = find(request)
    if found.seconds is None:
        return found
    slower = find(replace(request, efficiency=request.efficiency.slower()))
    return found._replace(spread=min(WIDEST, slower.seconds / found.seconds - 1))

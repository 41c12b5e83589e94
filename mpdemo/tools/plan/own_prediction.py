"""What a way to train needs, from its step on fake tensors: memory, time, and bytes sent around rings."""

from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.request import IN_BLOCKS, Prediction, flags_of, host_of
from mpdemo.tools.plan.roof import STATES, update_seconds

# An all-reduce is an all-gather and a reduce-scatter; a broadcast goes round the ring once.
HALVES = {"all-reduce": 2, IN_BLOCKS: 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}


def steps_of(request, size, **way):
    """Return the steps of all sizes of a local batch, exact for `size` samples."""
    from mpdemo.tools.plan.own_scaling import Line
    from mpdemo.tools.plan.own_step import Way

    return Line(request.model, Way(**way), STATES[request.optimizer], size)


def predicted(request, steps, step, parts, replicas, used, extra=0) -> Prediction:
    """Return what a way needs whose microbatches are such a `step`, which has sent what all of them send.

    `used` has, for each collective, its number of ranks and the bytes per second of its link; `extra` bytes are held
    besides.
    """
    sent = {}  # by a device, around a ring
    for kind, bytes_ in step.sent.items():
        ranks = used[kind][0]
        sent[kind] = HALVES[kind] * ((ranks - 1) / ranks) * bytes_
    computing = step.seconds(request.roof)

    def most():
        size = steps.most(request.limit - extra)
        return None if size is None else size * parts * replicas

    times = {kind: bytes_ / used[kind][1] for kind, bytes_ in sent.items()}
    sending, layers = sum(times.values()), max(1, len(steps.model.layers), steps.model.count)
    hidden = sending - times.get(IN_BLOCKS, 0.0)  # a block waits for its own messages
    seconds = None
    # of the others the first layer's gather, or the last one's reduction, is exposed
    if computing is not None:
        seconds = max(parts * computing / request.several, hidden) + hidden / layers + sending - hidden
        seconds += (
            0.0 if steps.way.offload else update_seconds(request.optimizer, step.trained, request.roof)
        )
    flags = flags_of(steps.way, parts, replicate=replicas // steps.way.shards)
    found = Prediction(step.peak + extra, seconds, sum(sent.values()), sending, parts, flags, most=most)
    if not steps.way.offload:
        return found
    loaded, stored = (parts * bytes_ for bytes_ in steps.with_host(step))
    least = max(loaded, stored) / GPUS[request.gpu].host  # both directions at once
    updating, on_host = host_of(request, step)
    seconds = seconds and max(seconds, least) + updating
    return found._replace(
        seconds=seconds, moved=loaded + stored, least=least, updating=updating, on_host=on_host
    )

"""What each device of a training will need, and what each process will send in a step, from its settings alone.

The answers of `mpdemo.plan.fit` are about any model; these are about the settings of ``python -m mpdemo train``, with
every rung and option. `mpdemo.labs.predictions` compares them with what is counted. Taught in
notebooks/11_which_one.ipynb.
"""

from dataclasses import replace

from mpdemo.cuts import block_names, resolve_cut
from mpdemo.plan import memory, sharded_layers, traffic
from mpdemo.plan.footprint import footprints
from mpdemo.rules import CUT_RUNGS
from mpdemo.schedules import placement

STATE = {"sgd": "momentum", "adamw": "adamw"}  # this course's SGD has momentum


def blocks_of(settings):
    """Return the footprints of a training's blocks, for the classes and channels of its data."""
    from mpdemo import data

    s = settings
    dataset = data.load(s.dataset, s.data, s.image_size, s.seed)
    facts = {"classes": dataset.classes, "channels": dataset.channels, "norm": s.norm}
    options = {"precision": s.precision, "checkpointing": s.activation_checkpointing}
    return footprints(s.model, s.image_size, **facts, **options)


def devices(settings, blocks) -> list[memory.DeviceMemory]:
    """Return the peak memory of every device, in the order of the ranks.

    Parameters
    ----------
    settings : Settings
        Checked.
    blocks : sequence of Footprint
        From `blocks_of`.
    """
    s = settings
    if s.rung in CUT_RUNGS:
        result = _stages(s, blocks) * (s.replicas or 1)
    elif s.rung in ("fsdp", "tensor"):
        result = [_sharing(s, blocks)] * (s.devices * (s.replicas or 1))
    else:
        states = [STATE[s.optimizer]] * s.devices
        if s.rung == "data_parallel":
            states[1:] = ["sgd"] * (s.devices - 1)  # one optimizer, on the first device
        share, ddp = s.batch_size // s.devices, s.rung == "ddp"
        result = [memory.replica(blocks, share, parts(s), state, ddp) for state in states]
    return [replace(device, device=number) for number, device in enumerate(result)]


def parts(settings) -> int:
    """Return in how many parts a device computes its share of the batch."""
    return settings.accumulate * settings.microbatches


def schedule_and_cut(settings):
    """Return the schedule of a cut model and the first block of every stage but the first."""
    s = settings
    schedule = "naive" if s.rung == "model_parallel" else s.schedule
    return schedule, resolve_cut(block_names(s.model), s.cut, len(placement(schedule, s.devices, s.stages_per_rank)))


def _stages(settings, blocks):
    """Return the devices of one replica of a cut model."""
    s, (schedule, points) = settings, schedule_and_cut(settings)
    share = s.batch_size // (s.replicas or 1)
    images, several = share // s.accumulate, s.accumulate > 1
    first, *others = memory.devices(
        *(blocks, points, images, s.form, schedule, s.microbatches, STATE[s.optimizer]),
        keep_gradients=several,
        shards=s.replicas if s.sharded else 1,
    )
    first = replace(first, activations=first.activations + (share - images) * blocks[0].input)  # they wait
    result = [first, *others]
    if s.rung == "hybrid" and s.form == "per-device" and not s.sharded:
        # the gradients are averaged in one message, which is a copy of them
        result = [replace(d, activations=max(d.activations, d.gradients)) for d in result]
    return result


def _sharing(settings, blocks):
    s = settings
    shards, splits = (s.devices, 1) if s.rung == "fsdp" else (s.replicas or 1, s.devices)
    options = {"reshard": s.reshard, "sequence_parallel": s.sequence_parallel}
    images = s.batch_size // shards
    return sharded_layers.device(
        blocks, images, STATE[s.optimizer], parts=parts(s), shards=shards, splits=splits, **options
    )


def messages(settings, blocks) -> list[dict]:
    """Return what each process hands to which collective in a step: kind -> bytes.

    Arguments as for `devices`.
    """
    s = settings
    replicas = s.replicas or 1
    if s.rung == "ddp" or (s.rung, s.form) == ("hybrid", "one-process"):
        return [traffic.of_replicas(blocks)] * (s.devices if s.rung == "ddp" else replicas)
    if s.form == "one-process":
        return [{}]
    if s.rung == "fsdp":
        return [traffic.of_shards(blocks, s.devices, parts(s), s.reshard)] * s.devices
    if s.rung == "tensor":
        kind = {"sequence_parallel": s.sequence_parallel, "bf16": s.precision == "bf16"}
        sent = traffic.of_split_layers(blocks, s.batch_size // replicas, s.accumulate, **kind)
        if replicas > 1:
            sent = traffic.added(sent, traffic.of_shards(blocks, replicas, parts(s), splits=s.devices))
        return [sent] * (s.devices * replicas)
    schedule, points = schedule_and_cut(s)
    owners = placement(schedule, s.devices, s.stages_per_rank)
    sent = traffic.of_stages(blocks, points, owners, s.batch_size // replicas)
    if s.rung == "hybrid":
        shards = {"shards": replicas, "parts": s.microbatches, "steps": s.accumulate} if s.sharded else {}
        exchanged = traffic.of_grid(blocks, points, owners, **shards)
        sent = [traffic.added(own, stage) for own, stage in zip(sent, exchanged, strict=True)]
    return sent * replicas

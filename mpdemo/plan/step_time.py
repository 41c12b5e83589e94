"""How long a step will take on this machine: what was measured of blocks, update and messages, put together.

`mpdemo.labs.speeds` measures these in seconds, before anything is trained; `mpdemo.labs.step_times` compares the sums
with real steps.

Most of what FSDP and tensor parallelism add to a step is the library's own work between messages, which does not depend
on the number of images. So a step with as few images as possible is measured, and what more images take is added.
"""

from dataclasses import dataclass, replace
from math import ceil

from mpdemo.errors import UserError
from mpdemo.plan import planner, predict, traffic
from mpdemo.settings import CUT_RUNGS, RUNG_FORMS

PREDICTED = ("single", "ddp", "model_parallel", "pipeline", "hybrid", "fsdp", "tensor")  # in their first form
IN_TURN = ("single", "model_parallel")  # rungs in which one device computes at a time
SHARDED = ("fsdp", "tensor")
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of DDP's messages


@dataclass(frozen=True)
class Speeds:
    """What a device of this machine takes.

    Attributes
    ----------
    alone, together : dict
        Images of a microbatch -> list of BlockCost, one per block: while the other devices rest, and while all of
        them compute (cores share the memory).
    update : float
        Seconds per byte of weights that the optimizer's step takes.
    messages : dict
        "send" or "all-reduce" -> seconds of a short message, and seconds per byte.
    split : dict
        As `together`, of blocks of which every device computes a part of each layer.
    sums : dict
        Images of a microbatch -> seconds in which all devices add up what a block puts out.
    fewest : dict
        Settings with `fewest_images` -> seconds of a step; needed for FSDP and tensor parallelism.
    """

    alone: dict
    together: dict
    update: float
    messages: dict
    split: dict
    sums: dict
    fewest: dict

    def message(self, kind, size, count=1) -> float:
        """Return the seconds of `count` messages of `size` bytes together."""
        latency, per_byte = self.messages[kind]
        return count * latency + size * per_byte


def images_at_once(settings) -> int:
    """Return the images of a microbatch: what a device computes in one pass."""
    shares = settings.devices if settings.rung in ("ddp", "fsdp") else settings.replicas or 1
    return settings.batch_size // shares // predict.parts(settings)


def fewest_images(settings):
    """Return the settings with a batch of one image per microbatch and device."""
    return replace(settings, batch_size=settings.batch_size // images_at_once(settings))


def seconds(settings, blocks, speeds) -> float:
    """Return the seconds of a step.

    Parameters
    ----------
    settings : Settings
        Checked, of a rung in PREDICTED, in float32.
    blocks : sequence of Footprint
        From `mpdemo.plan.predict.blocks_of`.
    speeds : Speeds
        With the costs of `images_at_once`.

    Raises
    ------
    UserError
        The rung or the form is not among those that can be predicted.
    """
    s = settings
    grid = s.sharded or (s.rung == "tensor" and s.replicas)
    if s.rung not in PREDICTED or s.form != RUNG_FORMS[s.rung][0] or grid:
        way = f"rung {s.rung}, {s.form}" + ", sharded" * bool(grid)
        raise UserError(f"no step time is predicted for {way}; allowed: {', '.join(PREDICTED)} in their first form")
    if s.rung in SHARDED:
        fewest = fewest_images(s)
        more = _computing(s, speeds) - _computing(fewest, speeds)
        if s.rung == "tensor":
            sums = traffic.sums_of_split_layers(blocks, predict.parts(s))
            more += sums * (speeds.sums[images_at_once(s)] - speeds.sums[1])
        return speeds.fewest[fewest] + more
    if s.rung in CUT_RUNGS:
        return _of_stages(s, blocks, speeds)
    weights = sum(block.weights for block in blocks)
    buckets = 1 + ceil(max(0, weights - FIRST_BUCKET) / BUCKET)
    averaging = speeds.message("all-reduce", weights, buckets) if s.rung == "ddp" else 0
    return _computing(s, speeds) + averaging + speeds.update * weights


def _costs(settings, speeds):
    """Return what each block costs for a microbatch of these settings."""
    s = settings
    measured = speeds.alone if s.rung in IN_TURN else speeds.split if s.rung == "tensor" else speeds.together
    again = s.activation_checkpointing  # the forward pass is repeated in the backward pass
    return [cost._replace(backward=cost.backward + again * cost.forward) for cost in measured[images_at_once(s)]]


def _computing(settings, speeds):
    """Return the seconds in which a device computes all its microbatches, one after the other."""
    return predict.parts(settings) * sum(cost.both for cost in _costs(settings, speeds))


def _of_stages(settings, blocks, speeds):
    """Simulate the schedule, and add what follows it on the fullest device."""
    s, costs, (schedule, points) = settings, _costs(settings, speeds), predict.schedule_and_cut(settings)
    latency, per_byte = speeds.messages["send"]
    share = s.batch_size // (s.replicas or 1) // s.accumulate
    link = {"latency": latency, "bandwidth": 1 / per_byte if per_byte > 0 else float("inf")}
    job = planner.Workload(blocks, {images_at_once(s): costs}, s.devices, share, **link)
    candidate = planner.evaluate(job, schedule, s.microbatches, points)
    weights = max(device.weights for device in candidate.devices)
    averaging = speeds.message("all-reduce", weights) if s.rung == "hybrid" else 0
    return s.accumulate * candidate.step_time + averaging + speeds.update * weights

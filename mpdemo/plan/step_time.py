"""How long a step will take on this machine: what was measured of blocks, update and messages, put together.

`mpdemo.labs.step_times` measures these in seconds, before anything is trained, and compares the sums with real steps.
FSDP and tensor parallelism are left out: most of what they add to a step is the library's own work between messages.
"""

from dataclasses import dataclass
from math import ceil

from mpdemo.errors import UserError
from mpdemo.plan import planner, predict
from mpdemo.settings import CUT_RUNGS, RUNG_FORMS

PREDICTED = ("single", "ddp", "model_parallel", "pipeline", "hybrid")  # rungs, in their first form and not sharded
IN_TURN = ("single", "model_parallel")  # rungs in which one device computes at a time
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
    """

    alone: dict
    together: dict
    update: float
    messages: dict

    def message(self, kind, size, count=1) -> float:
        """Return the seconds of `count` messages of `size` bytes together."""
        latency, per_byte = self.messages[kind]
        return count * latency + size * per_byte


def images_at_once(settings) -> int:
    """Return the images of a microbatch: what a device computes in one pass."""
    shares = settings.devices if settings.rung == "ddp" else settings.replicas or 1
    return settings.batch_size // shares // (settings.accumulate * settings.microbatches)


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
    if s.rung not in PREDICTED or s.form != RUNG_FORMS[s.rung][0] or s.sharded:
        way = f"rung {s.rung}, {s.form}" + ", sharded" * s.sharded
        raise UserError(f"no step time is predicted for {way}; allowed: {', '.join(PREDICTED)} in their first form")
    costs = (speeds.alone if s.rung in IN_TURN else speeds.together)[images_at_once(s)]
    if s.activation_checkpointing:
        costs = [cost._replace(backward=cost.backward + cost.forward) for cost in costs]
    if s.rung in CUT_RUNGS:
        return _of_stages(s, blocks, costs, speeds)
    weights = sum(block.weights for block in blocks)
    computing = s.accumulate * s.microbatches * sum(cost.both for cost in costs)
    buckets = 1 + ceil(max(0, weights - FIRST_BUCKET) / BUCKET)
    averaging = speeds.message("all-reduce", weights, buckets) if s.rung == "ddp" else 0
    return computing + averaging + speeds.update * weights


def _of_stages(settings, blocks, costs, speeds):
    """Simulate the schedule, and add what follows it on the fullest device."""
    s, (schedule, points) = settings, predict.schedule_and_cut(settings)
    latency, per_byte = speeds.messages["send"]
    share = s.batch_size // (s.replicas or 1) // s.accumulate
    link = {"latency": latency, "bandwidth": 1 / per_byte if per_byte > 0 else float("inf")}
    job = planner.Workload(blocks, {images_at_once(s): costs}, s.devices, share, **link)
    candidate = planner.evaluate(job, schedule, s.microbatches, points)
    weights = max(device.weights for device in candidate.devices)
    averaging = speeds.message("all-reduce", weights) if s.rung == "hybrid" else 0
    return s.accumulate * candidate.step_time + averaging + speeds.update * weights

"""How long a step will take on this machine: a step with few images, and what more images take in each block.

Much of a step does not depend on the number of images: the optimizer's update, the messages with weights and gradients,
and the library's own work between two operations. So a step with a quarter of the images is measured. What the others
take is computed, from blocks that were measured one by one and from the order in which the schedule runs them. (With a
single image all messages would stay in the processor's caches, and cost less than they do.)

`mpdemo.labs.speeds` measures both, before anything is trained; `mpdemo.labs.step_times` compares the sums with real
steps.
"""

from dataclasses import dataclass, replace

from mpdemo.errors import UserError
from mpdemo.plan import planner, predict
from mpdemo.settings import CUT_RUNGS, RUNG_FORMS

PREDICTED = ("single", "ddp", "model_parallel", "pipeline", "hybrid", "fsdp", "tensor")  # in their first form
IN_TURN = ("single", "model_parallel")  # rungs in which one device computes at a time
FEW = 4  # of so many images, one is in the step that is measured


@dataclass(frozen=True)
class Speeds:
    """What the devices of this machine take.

    Attributes
    ----------
    blocks : dict
        (where a block runs, as `where` says, and images of a microbatch) -> list of BlockCost, one per block.
    few : dict
        Settings with `few_images` -> seconds of a step.
    per_byte : float
        Seconds for each byte that one device sends to another.
    """

    blocks: dict
    few: dict
    per_byte: float


def where(settings) -> str:
    """Return where the blocks of a training run: on one device at a time, on all, or each split over all.

    Devices that compute at the same time may share their memory's speed. A split block holds its messages.
    """
    if settings.rung == "tensor":
        return "split tokens" if settings.sequence_parallel else "split layers"
    return "alone" if settings.rung in IN_TURN else "together"


def images_at_once(settings) -> int:
    """Return the images of a microbatch: what a device computes in one pass."""
    shares = settings.devices if settings.rung in ("ddp", "fsdp") else settings.replicas or 1
    return settings.batch_size // shares // predict.parts(settings)


def few_images(settings):
    """Return the settings with a quarter of the images in each microbatch, at least one."""
    images = images_at_once(settings)
    return replace(settings, batch_size=settings.batch_size // images * max(1, images // FEW))


def seconds(settings, blocks, speeds) -> float:
    """Return the seconds of a step.

    Parameters
    ----------
    settings : Settings
        Checked, of a rung in PREDICTED, in float32.
    blocks : sequence of Footprint
        From `mpdemo.plan.predict.blocks_of`.
    speeds : Speeds
        With the step of `few_images`, and the blocks for the `images_at_once` of both.

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
    few = few_images(s)
    return speeds.few[few] + _computing(s, blocks, speeds) - _computing(few, blocks, speeds)


def _computing(settings, blocks, speeds):
    """Return the seconds in which the devices compute all microbatches of a step."""
    s, images, again = settings, images_at_once(settings), settings.activation_checkpointing
    costs = [  # with checkpointing, the forward pass is repeated in the backward pass
        cost._replace(backward=cost.backward + again * cost.forward) for cost in speeds.blocks[where(s), images]
    ]
    if s.rung not in CUT_RUNGS:
        return predict.parts(s) * sum(cost.both for cost in costs)
    schedule, points = predict.schedule_and_cut(s)
    bandwidth = 1 / speeds.per_byte if speeds.per_byte > 0 else float("inf")
    share = s.batch_size // (s.replicas or 1) // s.accumulate
    job = planner.Workload(blocks, {images: costs}, s.devices, share, bandwidth=bandwidth)
    return s.accumulate * planner.evaluate(job, schedule, s.microbatches, points).step_time

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
from mpdemo.plan.cost import bandwidth, total
from mpdemo.rules import CUT_RUNGS
from mpdemo.settings import RUNG_FORMS

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
    """Return the settings with a quarter of the images per microbatch, and with two rather than with one."""
    images = images_at_once(settings)
    few = max(min(2, images), images // FEW)  # of a single image, batch norm may have but one value per channel
    return replace(settings, batch_size=settings.batch_size // images * few, micro_batch_size=None)


def is_predicted(settings) -> bool:
    """Whether the step of checked settings can be predicted: what is measured are blocks in plain float32."""
    s = settings
    grid = s.sharded or (s.rung == "tensor" and s.replicas)
    plain = s.precision == "fp32" and not (s.channels_last or s.compile)
    return s.rung in PREDICTED and s.form == RUNG_FORMS[s.rung][0] and plain and not grid


def seconds(settings, blocks, speeds) -> float:
    """Return the seconds of a step.

    Parameters
    ----------
    settings : Settings
        Checked; `is_predicted` must be true of them.
    blocks : sequence of Footprint
        From `mpdemo.plan.predict.blocks_of`.
    speeds : Speeds
        With the step of `few_images`, and the blocks for the `images_at_once` of both.

    Raises
    ------
    UserError
        It is not.
    """
    s = settings
    if not is_predicted(s):
        raise UserError(
            f"no step time is predicted for rung {s.rung}, {s.form}, with these options; allowed: "
            f"{', '.join(PREDICTED)} in their first form, in fp32, without a grid, --channels-last and --compile"
        )
    few = few_images(s)
    return speeds.few[few] + _computing(s, blocks, speeds) - _computing(few, blocks, speeds)


def _computing(settings, blocks, speeds):
    """Return the seconds in which the devices compute all microbatches of a step."""
    s, images, again = settings, images_at_once(settings), settings.activation_checkpointing
    costs = [  # with checkpointing, the forward pass is repeated in the backward pass
        cost._replace(backward=cost.backward + again * cost.forward) for cost in speeds.blocks[where(s), images]
    ]
    if s.rung not in CUT_RUNGS:
        return predict.parts(s) * total(costs)
    schedule, points = predict.schedule_and_cut(s)
    share = s.batch_size // (s.replicas or 1) // s.accumulate
    job = planner.Workload(blocks, {images: costs}, s.devices, share, bandwidth=bandwidth(speeds.per_byte))
    return s.accumulate * planner.evaluate(job, schedule, s.microbatches, points).step_time

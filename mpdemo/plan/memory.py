"""Peak memory of every device of a cut model, on a machine without any GPU.

The footprints of the blocks (`mpdemo.plan.footprint`) are added up in the order of the schedule: what
``torch.cuda.max_memory_allocated`` would report. Not counted is memory that is no tensor: the workspaces that cuDNN
and cuBLAS ask for while a convolution or a matrix product runs (tens of MiB; they differ from run to run), and the
CUDA context, which no PyTorch counter shows. `RESERVE` covers both. The tensors of the loss (some KiB) are left out.

Compared with what two processes hold in a step of the story's transformer (PyTorch 2.14; batches of 256 in 4 and in 8
microbatches; gpipe, 1f1b, interleaved-1f1b, zbv), 14 of 16 devices deviate by 0.3 % or less, the worst by 1.8 %.
Taught in notebooks/04_model_parallel.ipynb.
"""

from dataclasses import dataclass, replace

import numpy as np

from mpdemo.errors import UserError
from mpdemo.plan.cut import stage_slices
from mpdemo.plan.footprint import footprints
from mpdemo.plan.operation_memory import operations
from mpdemo.plan.order import KINDS, order_arrays
from mpdemo.schedules import placement, usual_stages_per_rank

MIB = 2**20
RESERVE = 768 * MIB  # of a GPU's memory, kept for the CUDA context (about 500 MiB) and for workspaces
STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # optimizer state, in values per parameter
FORMS = "per-device", "one-process"


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory of one device in a training step, in bytes.

    `activations` is all of the peak that is not weights, gradients or optimizer state: saved activations, the batch,
    and temporary tensors of the backward pass.
    """

    device: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self):
        """Bytes of all four together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(
    model,
    points,
    batch,
    image_size,
    *,
    form="per-device",
    schedule="gpipe",
    microbatches=1,
    optimizer="sgd",
    keep_gradients=False,
    classes=1000,
    channels=3,
    norm="batch",
):
    """Estimate the peak memory of every device without running it.

    Parameters
    ----------
    model : str
        One of ``mpdemo.settings.MODELS``.
    points : list of int
        Where the model is cut, as ``mpdemo.models.resolve_cut`` gives it.
    batch : int
        Samples of the whole batch.
    image_size, classes, channels, norm
        Of the data and the model, as in ``mpdemo.models.build``.
    form : {"per-device", "one-process"}
        One process per device, which runs the library's schedule, or one process that moves activations between
        devices, all forwards before all backwards.
    schedule, microbatches : str, int
        Of the pipeline. The form "one-process" always runs gpipe.
    optimizer : {"sgd", "momentum", "adamw"}
        What keeps state: nothing, one value or two values per parameter.
    keep_gradients : bool
        Whether ``zero_grad`` fills the gradients with zeros instead of dropping them.

    Returns
    -------
    list of DeviceMemory
        One per device.

    Raises
    ------
    UserError
        An unknown form, optimizer or schedule.
    """
    for what, value, allowed in (("optimizer", optimizer, STATES), ("form", form, FORMS)):
        if value not in allowed:
            raise UserError(f"unknown {what} {value!r}; allowed: {', '.join(allowed)}")
    blocks = footprints(model, image_size, classes=classes, channels=channels, norm=norm)
    return devices(blocks, points, batch, form, schedule, microbatches, optimizer, keep_gradients)


def devices(blocks, points, batch, form, schedule, microbatches, optimizer, keep_gradients=False, shards=1):
    """Add up the footprints of the blocks; arguments and result as in `estimate`.

    Parameters
    ----------
    blocks : sequence of Footprint
    shards : int
        Devices that hold the same stage and divide it by FSDP (hybrid, per-device).
    """
    one_process = microbatches if form == "one-process" else 0
    schedule = "gpipe" if one_process else schedule
    size, per_rank = batch // microbatches, usual_stages_per_rank(schedule)
    stages = [blocks[start:stop] for start, stop in stage_slices(points, len(blocks))]
    crossing = [0, *(size * stage[-1].output for stage in stages[:-1]), 0]  # bytes at the boundaries
    ranks = len(stages) // per_rank
    owners = np.array(placement(schedule, ranks))
    # with several stages per rank the library waits for its messages at the end of the step, and keeps them till then
    sent = np.multiply(crossing, [0, *(np.diff(owners) != 0), 0])  # bytes at the boundaries between two ranks
    kept = (sent[:-1] + sent[1:]) * (per_rank > 1)
    needed = np.array(
        [operations(stage, size, crossing[s], crossing[s + 1], kept[s], one_process) for s, stage in enumerate(stages)]
    )  # (stages, 8, 2)
    result = []
    for rank in range(ranks):
        own_stages = np.flatnonzero(owners == rank)
        own_blocks = [block for s in own_stages for block in stages[s]]
        always = batch * blocks[0].input if rank == 0 else 0
        if not one_process:  # a place for each microbatch's activations and gradients that are received
            always += microbatches * sum(crossing[s] + crossing[s + 1] for s in own_stages)
        if schedule not in ("naive", "gpipe") and per_rank == 1:
            always += sum(crossing[s] for s in own_stages)  # the gradient that is still being sent
        kind, stage, microbatch = order_arrays(schedule, rank, ranks, microbatches, per_rank)
        # gradients kept from the last step are added to; but one process first sums up its microbatches' elsewhere
        creates = (microbatch == 0) & (not keep_gradients or one_process > 1 or shards > 1)
        peaks, changes = needed[stage, kind + 4 * creates].T
        after = np.cumsum(changes)
        whole_at_peak, whole_after = _gathered(kind, own_blocks, per_rank) if shards > 1 else (0, 0)
        highest = always + max((after - changes + peaks + whole_at_peak).max(), (after + whole_after).max())
        result.append(_device(rank, own_blocks, highest, optimizer, keep_gradients, shards))
    return result


def _gathered(kind, blocks, per_rank):
    """Return the bytes of whole weights that FSDP keeps beside its part, at the peak and at the end of operations.

    A forward pass drops a block's weights after it, a backward pass keeps them for the next microbatch. A device with
    several stages has all of them whole. A block that is being gathered counts twice: the message in which its weights
    arrive, and the weights. That is near the truth for blocks of about equal size.
    """
    stage, block = (function(block.weights for block in blocks) for function in (sum, max))
    if per_rank > 1:
        return stage, stage
    forward = kind == KINDS.index("F")
    kept = ~forward & np.roll(~forward, 1)
    whole_after = np.where(forward, 0, stage + np.where(kept, 0, block))
    return np.where(kept, stage, 2 * block), whole_after


def replica(blocks, images, parts, optimizer, ddp=False) -> DeviceMemory:
    """Return the memory of a device that has the whole model, and computes `images` in so many parts.

    With one device, 1F1B is just that: forward and backward of one part after the other. DDP keeps the gradients from
    one step to the next, in its buckets; those of the parts are added up beside them.
    """
    device = devices(blocks, [], images, "per-device", "1f1b", parts, optimizer, ddp)[0]
    return replace(device, gradients=2 * device.gradients) if ddp and parts > 1 else device


def _device(rank, blocks, highest, optimizer, keep_gradients, shards):
    """Return the DeviceMemory of a rank whose batch and operations need at most `highest` bytes."""
    weights, gradients = (sum(getattr(block, name) for block in blocks) // shards for name in ("weights", "gradients"))
    state = STATES[optimizer] * gradients
    peak = weights + state + keep_gradients * gradients + highest
    if optimizer == "adamw":  # its step needs two more tensors like the parameter it updates
        peak = max(peak, weights + gradients + state + 2 * max(block.largest for block in blocks) // shards)
    return DeviceMemory(rank, weights, gradients, state, int(peak) - weights - gradients - state)

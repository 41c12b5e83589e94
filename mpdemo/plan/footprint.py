"""What every block of a model allocates, computes and moves, found on fake tensors: they have a shape, but no storage.

Each block is run alone, forward and backward, at two microbatch sizes. All counts are straight lines in the size, so
the two runs give them for every size. They tell the time on a GPU that is not here (`estimate`) and say where a cut may
lie; what a whole training holds is counted by running it (dry_run.py). Taught in notebooks/04_model_parallel.ipynb.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from mpdemo.errors import UserError
from mpdemo.plan.cost import BlockCost
from mpdemo.plan.subject import STATES, Subject
from mpdemo.schedules import SCHEDULES, placement
from mpdemo.world.devices import PEAKS

SIZES = 2, 8  # microbatch sizes of the two runs
ROOFS = {  # floating point operations and bytes per second (data sheets, float32), seconds to launch a kernel
    "v100": (PEAKS["v100"]["fp32"], 0.9e12, 5e-6),
    "a100": (PEAKS["a100"]["fp32"], 1.555e12, 5e-6),
    "h100": (PEAKS["h100"]["fp32"], 3.35e12, 4e-6),
}


@dataclass(frozen=True, eq=False)
class Footprint:
    """One block.

    Attributes
    ----------
    name : str
    parameters : int
        How many (not bytes).
    weights, gradients, largest : int
        Bytes of parameters and buffers, of the parameters' gradients, and of the largest gradient.
    input, output : int
        Bytes of one sample that cross the boundary before and after the block.
    lines : dict
        ``saved`` (bytes that a forward pass leaves behind), ``forward`` and ``backward`` (bytes above the start at the
        peak): the value without samples, and what each sample adds.
    work : dict
        A BlockCost's fields -> (kernels, 2, 2): operations and bytes moved of each kernel, as lines.
    """

    name: str
    parameters: int
    weights: int
    gradients: int
    largest: int
    input: int
    output: int
    lines: dict
    work: dict

    def bytes(self, what, size):
        """Return ``saved``, ``forward`` or ``backward`` for a microbatch of `size` samples."""
        return float(self.lines[what] @ (1, size))

    def seconds(self, kind, size, rate, bandwidth, launch):
        """Return the seconds of a pass: each kernel computes or moves, whichever takes longer, and is launched."""
        operations, moved = (self.work[kind] @ (1, size)).T
        return float((np.maximum(operations / rate, moved / bandwidth) + launch).sum())


def footprints(model, image_size, *, classes=1000, channels=3, norm="batch"):
    """Return the footprint of every block of a model."""
    return _footprints(Subject(model, image_size, classes, channels, norm))


@cache  # of values, however they were given: the same blocks are run once
def _footprints(subject):
    from mpdemo.plan import meter

    small, large = (meter.run_blocks(subject, size) for size in SIZES)
    result = []
    for (facts, lines, work), (_, more_lines, more_work) in zip(small, large, strict=True):
        lines = {name: _line(lines[name], more_lines[name]) for name in lines}
        # the library runs the weights' halves in any order, so kernels are sorted
        work = {kind: _line(sorted(work[kind]), sorted(more_work[kind])).reshape(-1, 2, 2) for kind in work}
        result.append(Footprint(**facts, lines=lines, work=work))
    return tuple(result)


def _line(small, large):
    """Return numbers at the two SIZES as lines: their values at size 0, and their slopes, in a last dimension."""
    small, large = np.array(small, dtype=float), np.array(large, dtype=float)
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return np.stack([small - SIZES[0] * slope, slope], axis=-1)


def estimate(model, sizes, image_size, gpu, **options):
    """Estimate the cost of every block on a GPU that is not here.

    Each operation takes the longer of computing (operations / peak rate) and moving (bytes / bandwidth), and a
    launch: the roofline model (https://doi.org/10.1145/1498765.1498785). Real kernels stay below the roof, so shares
    and ratios are worth more than seconds.

    Parameters
    ----------
    model, image_size, options
        As for `footprints`.
    sizes : sequence of int
        Samples of a microbatch.
    gpu : str
        A key of ROOFS.

    Returns
    -------
    dict
        Size -> list of BlockCost.

    Raises
    ------
    UserError
        No figures for this GPU.
    """
    if gpu not in ROOFS:
        raise UserError(f"no figures for GPU {gpu!r}; allowed: {', '.join(ROOFS)}, or measure")
    blocks = footprints(model, image_size, **options)
    return {
        size: [BlockCost(*(block.seconds(kind, size, *ROOFS[gpu]) for kind in BlockCost._fields)) for block in blocks]
        for size in sizes
    }


def owned_blocks(schedule, ranks, stages):
    """Return the blocks of every rank."""
    owners = placement(schedule, ranks, len(stages) // ranks)
    return [[b for stage, owner in zip(stages, owners, strict=True) if owner == rank for b in stage]
            for rank in range(ranks)]  # fmt: skip


def estimated_peaks(job, simulation, stages, owned, size) -> list:
    """Add up what every device holds, in the order of the simulation: a few per cent beside what a dry run counts."""
    result, splits = [], SCHEDULES[simulation.schedule].splits_backward
    crossing = [0, *(size * stage[-1].output for stage in stages[:-1]), 0]
    for rank, blocks in enumerate(owned):
        gradients = sum(block.gradients for block in blocks) / job.shards
        whole = (job.shards > 1) * 2 * max(block.weights for block in blocks)  # gathered by FSDP, block by block
        always = sum(block.weights for block in blocks) / job.shards + STATES[job.optimizer] * gradients + whole
        events = [row for row in simulation.events if row["rank"] == rank]
        places = sum(crossing[s] + crossing[s + 1] for s in {row["stage"] for row in events})
        level = always + simulation.microbatches * places + (rank == 0) * job.batch * blocks[0].input
        peak, created = level + gradients, 0.0
        for row in events:
            stage = stages[row["stage"]]
            saved = sum(block.bytes("saved", size) for block in stage)
            if row["kind"] == "F":
                level += saved
            elif row["kind"] != "I" or not splits:
                peak = max(peak, level + created + max(block.bytes("backward", size) for block in stage))
                level, created = level - saved, gradients
            peak = max(peak, level + created)
        temporary = 2 * max(block.largest for block in blocks) if job.optimizer == "adamw" else 0
        result.append(max(peak, always + gradients + temporary))
    return result


def sent(job, candidate) -> float:
    """Return the bytes that the busiest device sends in a step: activations to the next stage, gradients back."""
    stops, owners = candidate.points, placement(candidate.schedule, job.ranks, (len(candidate.points) + 1) // job.ranks)
    bytes_ = [0.0] * job.ranks
    for stop, here, there in zip(stops, owners, owners[1:], strict=False):
        for rank in (here, there) if here != there else ():
            bytes_[rank] += job.blocks[stop - 1].output * job.batch
    return max(bytes_)

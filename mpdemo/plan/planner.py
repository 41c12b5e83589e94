"""Choose cut, schedule and number of microbatches together: every candidate is simulated, the fastest that fits wins.

Taught in notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass

from mpdemo.errors import UserError
from mpdemo.plan.cut import balanced_cut, improve
from mpdemo.plan.footprint import rank_peak, saved_by
from mpdemo.plan.simulate import Simulation, simulate
from mpdemo.schedules import SCHEDULES, check_schedule, placement, usual_stages_per_rank

MOST_MICROBATCHES = 64


@dataclass(frozen=True)
class Job:
    """What is to be planned.

    Attributes
    ----------
    blocks : list of Footprint
        From `mpdemo.plan.footprint.footprints`.
    costs : dict
        Samples of a microbatch -> list of BlockCost, from `mpdemo.plan.cost`; {} where only memory matters.
    ranks, batch : int
        Devices, and samples of the whole batch.
    limit : float
        Bytes that PyTorch may use on every device; infinite by default.
    optimizer : str
        "sgd", "momentum" or "adamw".
    bandwidth : float
        Bytes a second between two devices.
    """

    blocks: list
    costs: dict
    ranks: int
    batch: int
    limit: float = float("inf")
    optimizer: str = "sgd"
    bandwidth: float = 10e9


@dataclass(frozen=True)
class Candidate:
    """One way to run the job, simulated.

    Attributes
    ----------
    points : list of int
        The first block of every stage but the first.
    peaks : list of float
        Bytes a device, added up from the blocks' footprints.
    """

    schedule: str
    microbatches: int
    points: list
    simulation: Simulation
    peaks: list

    @property
    def step_time(self):
        """Predicted seconds a step."""
        return self.simulation.step_time

    def overflow(self, limit):
        """Bytes that the fullest device lacks; 0 where all fit."""
        return max(0.0, max(self.peaks) - limit)


def stage_slices(points, count):
    """Return (start, stop) of every stage."""
    edges = [0, *points, count]
    return list(zip(edges, edges[1:], strict=False))


def evaluate(job, schedule, microbatches, points):
    """Simulate one candidate and add up its memory.

    Returns
    -------
    Candidate
    """
    size = job.batch // microbatches
    slices = stage_slices(points, len(job.blocks))
    stages = [job.blocks[a:b] for a, b in slices]
    forward, backward, weight = _times(job, schedule, size, slices)
    borders = [stage[-1].output * size / job.bandwidth for stage in stages[:-1]]
    simulation = simulate(schedule, forward, backward, microbatches, job.ranks, weight, borders or 0.0)
    held = simulation.held([saved_by(stage, size) for stage in stages])
    owners = placement(schedule, job.ranks)
    peaks = []
    for rank in range(job.ranks):
        mine = [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
        images = job.batch * job.blocks[0].input if owners[0] == rank else 0.0
        peaks.append(rank_peak(mine, held[rank], size, images, job.optimizer))
    return Candidate(schedule, microbatches, list(points), simulation, peaks)


def _times(job, schedule, size, slices):
    """Return forward and backward seconds of every stage, and the weight gradient's share where it is split off."""
    if not job.costs:  # only memory matters: any times will do
        ones = [1.0] * len(slices)
        return ones, ones, None
    stages = [sum(job.costs[size][a + 1 : b], job.costs[size][a]) for a, b in slices]
    if not SCHEDULES[schedule].splits_backward:
        return [s.forward for s in stages], [s.backward for s in stages], None
    backward = [stages[0].backward, *(s.input + s.weight for s in stages[1:])]
    weight = [1.0, *(s.weight / (s.input + s.weight) for s in stages[1:])]  # as `simulate` says of the first stage
    return [s.forward for s in stages], backward, weight


def candidates(job, schedules=None, microbatches=None, cut=None):
    """Return the best cut of every schedule and every number of microbatches that can run, fastest first.

    Parameters
    ----------
    schedules : list of str, optional
        All of SCHEDULES by default.
    microbatches : list of int, optional
        Those of `divisors` by default; naive runs with one.
    cut : list of int, optional
        Take this cut instead of searching; schedules that want another number of stages are left out.

    Returns
    -------
    list of Candidate
        Those that do not fit in memory are at the end, the nearest to fitting first.
    """
    found = []
    for schedule in schedules or SCHEDULES:
        stages = job.ranks * usual_stages_per_rank(schedule)
        if stages > len(job.blocks) or (cut is not None and len(cut) + 1 != stages):
            continue
        for count in [1] if schedule == "naive" else microbatches or divisors(job):
            try:
                check_schedule(schedule, job.ranks, count, None, job.batch)
            except UserError:
                continue
            found.append(
                _best_cut(job, schedule, count, stages) if cut is None else evaluate(job, schedule, count, cut)
            )
    return sorted(found, key=lambda c: (c.overflow(job.limit), c.step_time))


def divisors(job):
    """Return the numbers of microbatches to try: they divide the batch, keep every device busy, and are at most 64."""
    return [m for m in range(job.ranks, min(job.batch, MOST_MICROBATCHES) + 1) if job.batch % m == 0]


def _best_cut(job, schedule, count, stages):
    """Start from the most even cut, then move borders while the simulated step gets shorter, or fits better."""
    size = job.batch // count
    if job.costs:
        even = balanced_cut([cost.both for cost in job.costs[size]], stages)
    else:
        even = balanced_cut([block.saved + block.weights / size for block in job.blocks], stages)

    def score(points):
        candidate = evaluate(job, schedule, count, points)
        return (candidate.overflow(job.limit), candidate.step_time if job.costs else max(candidate.peaks))

    points, _ = improve(even, len(job.blocks), score)
    return evaluate(job, schedule, count, points)


def choose(found, limit):
    """Return the fastest candidate that fits; of those within 1 % of it, which no clock tells apart, the smallest.

    Parameters
    ----------
    found : list of Candidate
        From `candidates`.
    limit : float
        Bytes a device.

    Returns
    -------
    Candidate
        Where nothing fits, the one that lacks least.
    """
    fitting = [c for c in found if not c.overflow(limit)]
    if not fitting:
        return found[0]
    close = [c for c in fitting if c.step_time <= 1.01 * fitting[0].step_time]
    return min(close, key=lambda c: max(c.peaks))


def one_device_step_time(job):
    """Return the seconds of a step of the whole batch on one device: what naive model parallelism takes at best."""
    return sum(cost.both for cost in job.costs[job.batch])


def usual_cut(job):
    """Return the cut that many examples take: after layer2 for two devices, else equally many blocks a stage."""
    names = [block.name for block in job.blocks]
    second = [i for i, name in enumerate(names) if name.startswith("layer2.")]
    if job.ranks == 2 and second:
        return [second[-1] + 1]
    return [round(len(names) * i / job.ranks) for i in range(1, job.ranks)]

"""Choose cut, schedule and number of microbatches together: every candidate is simulated, the fastest that fits wins.

While cuts are compared, memory is a sum over the blocks (`estimated_peaks`); that of the answer is counted by a dry
run. Taught in notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass, field

from mpdemo.errors import UserError
from mpdemo.plan.cost import total
from mpdemo.plan.cut import balanced_cut, improve, stage_slices
from mpdemo.plan.footprint import estimated_peaks, owned_blocks
from mpdemo.plan.simulate import Simulation, simulate
from mpdemo.plan.subject import Subject
from mpdemo.schedules import SCHEDULES, check_schedule, usual_stages_per_rank

MOST_MICROBATCHES = 64


@dataclass(frozen=True)
class Workload:
    """What is to be planned.

    Attributes
    ----------
    blocks : sequence of Footprint
        From `mpdemo.plan.footprint.footprints`.
    costs : dict
        Samples of a microbatch -> list of BlockCost, from `mpdemo.plan.cost`; {} where only memory matters.
    ranks, batch : int
        Devices, and samples of the whole batch.
    limit : float
        Bytes that PyTorch may use on every device; infinite by default.
    optimizer : str
        "sgd", "momentum" or "adamw".
    bandwidth, latency : float
        Bytes per second between two devices, and seconds of a message without any.
    update : float
        Seconds of the optimizer's step for each byte of weights.
    form : str
        "per-device" or "one-process", as for `mpdemo.plan.memory.estimate`.
    shards : int
        Replicas that divide every stage among them.
    subject : Subject, optional
        What is trained, for a dry run.
    """

    blocks: list
    costs: dict
    ranks: int
    batch: int
    limit: float = float("inf")
    optimizer: str = "sgd"
    bandwidth: float = 10e9
    latency: float = 0.0
    update: float = 0.0
    form: str = "per-device"
    shards: int = 1
    subject: Subject | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to run the workload, simulated: `peaks` are the estimated bytes of every device."""

    schedule: str
    microbatches: int
    points: list
    simulation: Simulation
    peaks: list = field(repr=False)
    update: float = 0.0  # seconds of the optimizer's step on the device with the most weights

    @property
    def step_time(self):
        """Predicted seconds per step."""
        return self.simulation.step_time + self.update

    def overflow(self, limit):
        """Bytes that the fullest device lacks; 0 where all fit."""
        return max(0.0, max(self.peaks) - limit)


def evaluate(job, schedule, microbatches, points) -> Candidate:
    """Simulate one candidate and estimate its memory."""
    size = job.batch // microbatches
    slices = stage_slices(points, len(job.blocks))
    forward, backward, weight = _times(job, schedule, size, slices)
    seconds = [job.latency + job.blocks[stop - 1].output * size / job.bandwidth for _, stop in slices[:-1]]
    simulation = simulate(schedule, forward, backward, microbatches, job.ranks, weight, seconds or 0.0)
    stages = [job.blocks[start:stop] for start, stop in slices]
    owned = owned_blocks(schedule, job.ranks, stages)
    update = job.update * max(sum(block.weights for block in own) for own in owned)
    peaks = estimated_peaks(job, simulation, stages, owned, size)
    return Candidate(schedule, microbatches, list(points), simulation, peaks, update)


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


def devices(job, candidate) -> list:
    """Return the DeviceMemory of every device of a candidate, by a dry run."""
    from mpdemo.plan.memory import estimate

    options = {"form": job.form, "schedule": candidate.schedule, "microbatches": candidate.microbatches}
    facts = job.subject._asdict()
    model, image_size = facts.pop("model"), facts.pop("image_size")
    return estimate(model, candidate.points, job.batch, image_size, optimizer=job.optimizer, **options, **facts)


def candidates(job, schedules=None, microbatches=None, cut=None) -> list[Candidate]:
    """Return the best cut of every schedule and every number of microbatches that can run, fastest first.

    A given `cut` is taken instead of searching; schedules that want another number of stages are then left out.
    Candidates that do not fit in memory are at the end, the nearest to fitting first.
    """
    result = []
    for schedule in schedules or SCHEDULES:
        stages = job.ranks * usual_stages_per_rank(schedule)
        if stages > len(job.blocks) or (cut is not None and len(cut) + 1 != stages):
            continue
        for count in microbatches or divisors(job):
            try:
                check_schedule(schedule, job.ranks, count, job.batch)
            except UserError:
                continue
            points = best_cut(job, schedule, count, stages) if cut is None else cut
            result.append(evaluate(job, schedule, count, points))
    return sorted(result, key=lambda c: (c.overflow(job.limit), c.step_time))


def divisors(job):
    """Return the numbers of microbatches to try: they divide the batch, keep every device busy, and are at most 64."""
    return [m for m in range(job.ranks, min(job.batch, MOST_MICROBATCHES) + 1) if job.batch % m == 0]


def best_cut(job, schedule, count, stages):
    """Start from the most even cut, then move boundaries while the simulated step gets shorter, or fits better."""
    size = job.batch // count
    if job.costs:
        even = balanced_cut([cost.both for cost in job.costs[size]], stages)
    else:
        even = balanced_cut([block.bytes("saved", size) + block.weights for block in job.blocks], stages)

    def score(points):
        candidate = evaluate(job, schedule, count, points)
        return (candidate.overflow(job.limit), candidate.step_time if job.costs else max(candidate.peaks))

    points, _ = improve(even, len(job.blocks), score)
    return points


def choose(choices, limit) -> Candidate:
    """Return the fastest candidate that fits; of those within 1 % of it, the one which needs least memory.

    Times less than 1 % apart cannot be told apart by measuring. Where nothing fits: the one that lacks least.
    """
    fitting = [c for c in choices if not c.overflow(limit)]
    if not fitting:
        return choices[0]
    close = [c for c in fitting if c.step_time <= 1.01 * fitting[0].step_time]
    return min(close, key=lambda c: max(c.peaks))


def one_device_step_time(job):
    """Return the seconds of a step of the whole batch on one device: what naive model parallelism takes at best."""
    return total(job.costs[job.batch]) + job.update * sum(block.weights for block in job.blocks)


def usual_cut(job):
    """Return the cut that many examples take: after layer2 for two devices, else equally many blocks per stage."""
    names = [block.name for block in job.blocks]
    second = [i for i, name in enumerate(names) if name.startswith("layer2.")]
    if job.ranks == 2 and second:
        return [second[-1] + 1]
    return [round(len(names) * i / job.ranks) for i in range(1, job.ranks)]

"""Choose cut, schedule and number of microbatches together: every candidate is simulated, the fastest that fits wins.

The slowest stage sets the pace, so a cut makes it as fast as possible. While cuts are compared, memory is a sum over
the blocks (`estimated_peaks`); the answer's memory is counted by a dry run. Taught in notebooks/05_pipeline.ipynb.
"""

from itertools import accumulate, pairwise, product
from typing import NamedTuple

from mpdemo.cuts import resolve_cut
from mpdemo.errors import UserError
from mpdemo.plan.footprint import estimated_peaks
from mpdemo.plan.simulate import Simulation, simulate
from mpdemo.plan.subject import STATES, settled
from mpdemo.schedules import SCHEDULES, check_schedule, divisors, placement, usual_stages_per_rank

MOST_MICROBATCHES = 64
BANDWIDTH = 10e9  # bytes per second between two stages


class Candidate(NamedTuple):
    """One way to run a case as a pipeline, simulated: `peaks` are the estimated bytes of every device."""

    schedule: str
    microbatches: int
    points: list
    simulation: Simulation
    peaks: list

    @property
    def step_time(self):
        """Predicted seconds per step."""
        return self.simulation.step_time

    def overflow(self, limit):
        """Bytes that the fullest device lacks; 0 where all fit."""
        return max(0.0, max(self.peaks) - limit)


def evaluate(case, schedule, microbatches, points, shards=1, bandwidth=BANDWIDTH) -> Candidate:
    """Simulate one candidate and estimate its memory; `shards` replicas divide every stage."""
    size, blocks = case.batch // microbatches, case.blocks()
    costs, slices = case.costs(size), stage_slices(points, len(blocks))
    forward, backward = ([sum(cost[kind] for cost in costs[a:b]) for a, b in slices] for kind in (0, 1))
    messages = [blocks[stop - 1].output * size / bandwidth for _, stop in slices[:-1]]
    simulation = simulate(schedule, forward, backward, microbatches, case.devices, communication=messages)
    stages = [blocks[start:stop] for start, stop in slices]
    return Candidate(
        schedule, microbatches, list(points), simulation, estimated_peaks(case, simulation, stages, size, shards)
    )


def devices(case, candidate) -> list:
    """Return the DeviceMemory of every device of a candidate, by a dry run."""
    from mpdemo.plan import memory

    how = {"schedule": candidate.schedule, "microbatches": candidate.microbatches}
    s = settled(case.subject, "pipeline", case.batch, case.devices, cut=",".join(map(str, candidate.points)), **how)
    return [rank.devices[0] for rank in memory.processes(case.subject, s, STATES[case.optimizer])]


def sent(case, candidate) -> float:
    """Return the bytes that the busiest device sends in a step: activations to the next stage, gradients back."""
    owners, bytes_ = placement(candidate.schedule, case.devices), [0.0] * case.devices
    for stop, here, there in zip(candidate.points, owners, owners[1:], strict=False):
        for rank in (here, there) if here != there else ():
            bytes_[rank] += case.blocks()[stop - 1].output * case.batch
    return max(bytes_)


def candidates(case, schedules=SCHEDULES, microbatches=None, cut=None) -> list[Candidate]:
    """Return the best cut of every schedule and every number of microbatches that can run, fastest first.

    A given `cut` is taken instead of searching; schedules that want another number of stages are then left out.
    Candidates that do not fit in memory are at the end, the nearest to fitting first.
    """
    result = []
    for schedule in schedules:
        stages = case.devices * usual_stages_per_rank(schedule)
        if stages > len(case.blocks()) or (cut is not None and len(cut) + 1 != stages):
            continue
        for count in microbatches or [m for m in divisors(case.batch) if case.devices <= m <= MOST_MICROBATCHES]:
            try:
                check_schedule(schedule, case.devices, count, case.batch)
            except UserError:
                continue
            points = best_cut(case, schedule, count, stages) if cut is None else cut
            result.append(evaluate(case, schedule, count, points))
    return sorted(result, key=lambda c: (c.overflow(case.limit), c.step_time))


def best_cut(case, schedule, count, stages):
    """Start from the most even cut, then move boundaries while the simulated step gets shorter, or fits better."""

    def score(points):
        candidate = evaluate(case, schedule, count, points)
        return candidate.overflow(case.limit), candidate.step_time

    even = balanced_cut([cost.both for cost in case.costs(case.batch // count)], stages)
    return improve(even, len(case.blocks()), score)


def usual_cut(case):
    """Return the cut that many examples take: after layer2 for two devices, else equally many blocks per stage."""
    names = [block.name for block in case.blocks()]
    second = [name for name in names if name.startswith("layer2.")]
    return resolve_cut(names, second[-1] if case.devices == 2 and second else None, case.devices)


def balanced_cut(costs, stages) -> list[int]:
    """Cut a chain of blocks so that the most expensive stage is as cheap as possible: [first block of each but one].

    Dynamic programming over "the first j blocks in s stages": n blocks and k stages take n * n * k steps. Among the
    cuts with the same slowest stage, the one with the most even stages (least sum of squares) is taken.
    """
    count = len(costs)
    total = list(accumulate(costs, initial=0.0))
    nothing = (float("inf"), float("inf"))
    best = [(0.0, 0.0)] + [nothing] * count  # (slowest stage, sum of squares) for the first j blocks
    choice = []
    for stage in range(stages):
        row, cuts = [nothing] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in range(stage, stop):
                cost = total[stop] - total[start]
                slowest, squares = best[start]
                value = (max(slowest, cost), squares + cost * cost)
                if value < row[stop]:
                    row[stop], cuts[stop] = value, start
        best = row
        choice.append(cuts)
    points, stop = [], count
    for cuts in reversed(choice):
        stop = cuts[stop]
        points.append(stop)
    return points[::-1][1:]


def improve(points, count, score):
    """Move one or several neighbouring boundaries by one block as long as that lowers the score."""
    best = score(points)
    runs = [(first, n) for first in range(len(points)) for n in range(1, len(points) - first + 1)]
    improved = True
    while improved:
        improved = False
        for (first, n), by in product(runs, (-1, 1)):
            moved = [p + by if first <= i < first + n else p for i, p in enumerate(points)]
            if all(start < stop for start, stop in stage_slices(moved, count)) and (value := score(moved)) < best:
                points, best, improved = moved, value, True
    return points


def stage_slices(points, count):
    """Return (start, stop) of every stage."""
    return list(pairwise([0, *points, count]))

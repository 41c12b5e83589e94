"""Where to split a model into a pipeline: the cut whose simulated step is shortest among those that fit.

The slowest stage sets the pace, so a cut makes it as fast as possible. Memory is a sum over the blocks. Taught in
notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.predict.footprint import RESERVE, STATES, ModelSpec, costs, footprints
from mpdemo.predict.simulate import Simulation, simulate
from mpdemo.settings.schedules import SCHEDULES, check_schedule, placement, usual_stages_per_rank
from mpdemo.world.gpus import GPUS


@dataclass(frozen=True)
class SplitRequest:
    """Which model is to be split over which devices of one node: `batch` images, `memory` bytes of each device."""

    spec: ModelSpec
    batch: int
    devices: int
    gpu: str  # one of `mpdemo.world.gpus.GPUS`
    memory: float = float("inf")
    optimizer: str = "sgd"  # one of `STATES`

    @property
    def limit(self) -> float:
        """Bytes of one device that PyTorch may use."""
        return self.memory - RESERVE

    def blocks(self) -> tuple:
        """Return the footprints of the model's blocks."""
        return footprints(self.spec)

    def costs(self, size) -> list:
        """Return the estimated costs of the blocks for `size` images."""
        return costs(self.spec, size, self.gpu)


class Candidate(NamedTuple):
    """One way to run a request as a pipeline, simulated: `peaks` are the estimated bytes of every device."""

    points: list
    simulation: Simulation
    peaks: list

    @property
    def step_time(self):
        """Predicted seconds per step."""
        return self.simulation.step_time


def evaluate(request, schedule, microbatches, points) -> Candidate:
    """Simulate one candidate and estimate its memory."""
    size, blocks = request.batch // microbatches, request.blocks()
    costs, slices = request.costs(size), stage_slices(points, len(blocks))
    forward, backward = ([sum(cost[kind] for cost in costs[a:b]) for a, b in slices] for kind in (0, 1))
    messages = [blocks[stop - 1].output * size / GPUS[request.gpu].link for _, stop in slices[:-1]]
    simulation = simulate(schedule, forward, backward, microbatches, request.devices, communication=messages)
    stages = [blocks[start:stop] for start, stop in slices]
    return Candidate(list(points), simulation, estimated_peaks(request, simulation, stages, size))


def estimated_peaks(request, simulation, stages, size) -> list:
    """Add up what every device holds, in the order of the simulation; `stages` are lists of footprints."""
    result = []
    owners = placement(simulation.schedule, simulation.ranks, simulation.stages_per_rank)
    crossing = [0, *(size * stage[-1].output for stage in stages[:-1]), 0]
    for rank in range(simulation.ranks):
        blocks = [block for stage, owner in zip(stages, owners, strict=True) if owner == rank for block in stage]
        gradients = sum(block.gradients for block in blocks)
        always = sum(block.weights for block in blocks) + STATES[request.optimizer] * gradients
        events = [row for row in simulation.events if row["rank"] == rank]
        places = sum(crossing[s] + crossing[s + 1] for s in {row["stage"] for row in events})
        level = always + simulation.microbatches * places
        if rank == 0:
            level += request.batch * blocks[0].input
        splits = SCHEDULES[simulation.schedule].splits_backward
        peak = peak_of_events(events, stages, size, level, gradients, splits)
        temporary = 2 * max(block.largest for block in blocks) if request.optimizer == "adamw" else 0
        result.append(max(peak, always + gradients + temporary))
    return result


def peak_of_events(events, stages, size, level, gradients, splits) -> float:
    """Return the most that a rank holds while it goes through its events, beginning at a level; its gradients stay."""
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
    return peak


def best_split(request, schedule, microbatches) -> Candidate:
    """Return the best cut of a model over the request's devices: the fastest that fits, or else the nearest to fitting.

    It starts from the most even cut, then moves boundaries while the simulated step gets shorter, or fits better.
    """
    schedule = check_schedule(schedule, request.devices, microbatches, request.batch)

    def score(points):
        candidate = evaluate(request, schedule, microbatches, points)
        return max(0.0, max(candidate.peaks) - request.limit), candidate.step_time  # first what does not fit

    seconds = [cost.both for cost in request.costs(request.batch // microbatches)]
    stages = request.devices * usual_stages_per_rank(schedule)
    if stages > len(seconds):
        raise UserError(f"{stages} stages do not fit a model of {len(seconds)} blocks; allowed: 1 to {len(seconds)}")
    even = balanced_cut(seconds, stages)
    return evaluate(request, schedule, microbatches, improve(even, len(seconds), score))


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

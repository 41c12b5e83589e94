"""Simulate a schedule: when does every rank compute what, how long is the step, how long does each rank wait?

The rule is short. A rank works through its list of operations in order; an operation starts when the rank is free
and what it needs has arrived: a forward needs the stage before, a backward the stage after, the weight gradient
nothing but its own rank. Taught in notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpdemo.errors import UserError
from mpdemo.plan.order import KINDS, B, F, I, W, order_arrays
from mpdemo.schedules import SCHEDULES, check_schedule, placement


@dataclass(frozen=True)
class Simulation:
    """A simulated training step.

    The arrays hold one row per rank and one column per operation, in the order in which the rank works.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    microbatches: int
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray  # s
    end: np.ndarray  # s

    @property
    def step_time(self):
        """Seconds from the first operation's start to the last one's end."""
        return float(self.end.max())

    @property
    def idle_share(self):
        """Share of all ranks' time in which nothing is computed: the bubble."""
        return 1 - float((self.end - self.start).sum(axis=1).mean()) / self.step_time

    @cached_property
    def peak_activations(self):
        """Microbatches whose activations each rank holds at the worst moment, counted stage by stage.

        A rank with two stages counts a microbatch twice when both stages hold it: each is half as much memory.
        """
        frees = W if SCHEDULES[self.schedule].splits_backward else B
        change = (self.kind == F).astype(int) - (self.kind == frees)
        return np.cumsum(change, axis=1).max(axis=1).tolist()

    @cached_property
    def events(self):
        """The timeline as rows, sorted by rank and start: what `mpdemo.timeline.record` records of a real step."""
        columns = (self.kind, self.stage, self.microbatch, self.start, self.end)
        return [
            {"rank": rank, "stage": s, "kind": KINDS[k], "microbatch": m, "start": start, "end": end}
            for rank in range(self.ranks)
            for k, s, m, start, end in zip(*(column[rank].tolist() for column in columns), strict=True)
        ]


def simulate(schedule, forward, backward, microbatches, ranks, weight=None, communication=0.0):
    """Simulate one training step of a pipeline.

    Parameters
    ----------
    schedule : str
        A name in SCHEDULES.
    forward, backward : sequence of float
        Seconds that one microbatch takes on each stage; as many entries as stages, P * v.
    microbatches, ranks : int
        M and P.
    weight : float or sequence of float, optional
        Share of each stage's backward that is the weight gradient (only zero-bubble schedules split it). By default
        half, and all of it on the first stage: that stage's input needs no gradient, so the library computes its
        whole backward pass when the weight gradient's turn comes.
    communication : float or sequence of float
        Seconds from the end of an operation until another rank can use its result; one number, or one for each
        stage boundary. Between two stages of one rank it is 0.

    Returns
    -------
    Simulation

    Raises
    ------
    UserError
        Where the schedule cannot do this, or the lists have different lengths.

    Examples
    --------
    >>> result = simulate("gpipe", forward=[1, 1], backward=[2, 2], microbatches=4, ranks=2)
    >>> result.step_time, round(result.idle_share, 3)
    (15.0, 0.2)
    """
    forward, backward = np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)
    stages = len(forward)
    if len(backward) != stages or stages == 0 or stages % ranks:
        raise UserError(
            f"{stages} forward and {len(backward)} backward times for {ranks} ranks; "
            f"allowed: one of each per stage, and a multiple of {ranks} stages"
        )
    stages_per_rank = check_schedule(schedule, ranks, microbatches, stages // ranks)
    orders = [order_arrays(schedule, rank, ranks, microbatches, stages_per_rank) for rank in range(ranks)]
    kind, stage, microbatch = (np.stack([order[column] for order in orders]) for column in range(3))
    share = np.where(np.arange(stages) == 0, 1.0, 0.5) if weight is None else np.asarray(weight, dtype=float)
    seconds = np.stack([forward, backward, (1 - share) * backward, share * backward])  # in the order of KINDS
    duration = seconds[kind, stage]
    owners = np.asarray(placement(schedule, ranks, stages_per_rank))
    start = _start_times(duration, *_dependencies(kind, stage, microbatch, owners, communication))
    return Simulation(schedule, ranks, stages_per_rank, microbatches, kind, stage, microbatch, start, start + duration)


def _dependencies(kind, stage, microbatch, owners, communication):
    """Return, for each operation, the result it waits for, the seconds until that arrives, and the result it gives.

    Result s * M + m is the forward of microbatch m through stage s, result S * M + s * M + m its backward. Of the last
    two numbers, 2 * S * M stands for "nothing", which is there from the start, the other for a result nobody uses.
    """
    stages, microbatches = len(owners), int(microbatch.max()) + 1
    results = stages * microbatches
    boundary = np.zeros(stages + 1)  # boundary s lies between stages s-1 and s
    boundary[1:stages] = np.where(owners[1:] != owners[:-1], communication, 0.0)
    own = stage * microbatches + microbatch
    after_forward = (kind == F) & (stage > 0)
    after_backward = ((kind == B) | (kind == I)) & (stage < stages - 1)
    conditions = [after_forward, after_backward]
    needs = np.select(conditions, [own - microbatches, results + own + microbatches], 2 * results)
    delay = np.select(conditions, [boundary[stage], boundary[stage + 1]], 0.0)
    gives = np.select([kind == F, kind == W], [own, 2 * results + 1], results + own)
    return needs, delay, gives, 2 * results + 2


def _start_times(duration, needs, delay, gives, results):
    """Return every operation's start.

    All ranks advance together: each whose next operation has what it needs takes it, and so on until all are done.
    One such sweep is a few array operations, so hundreds of ranks cost hardly more than two.
    """
    ranks, length = duration.shape
    finished = np.full(results, np.inf)
    finished[-2] = 0.0
    start = np.empty(ranks * length)
    needs, delay, duration, gives = (array.ravel() for array in (needs, delay, duration, gives))
    free, position = np.zeros(ranks), np.arange(ranks) * length
    end, waiting = position + length, np.arange(ranks)
    while len(waiting):
        operation = position[waiting]
        arrival = finished[needs[operation]] + delay[operation]
        ready = np.isfinite(arrival)
        if not ready.any():
            raise RuntimeError(f"this order never ends: rank {waiting[0]} waits for an operation that waits for it")
        rank, operation = waiting[ready], operation[ready]
        start[operation] = begin = np.maximum(arrival[ready], free[rank])
        free[rank] = finished[gives[operation]] = begin + duration[operation]
        position[rank] += 1
        waiting = waiting[position[waiting] < end[waiting]]
    return start.reshape(ranks, length)

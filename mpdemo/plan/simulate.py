"""Run a schedule on paper: when does every rank compute what, how long is the step, how long does each rank wait?

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

    The arrays hold one row a rank and one column an operation, in the order in which the rank works.
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

    @cached_property
    def idle_share_per_rank(self):
        """Share of the step in which each rank computes nothing: the bubble, rank by rank."""
        return [1 - float(busy) / self.step_time for busy in (self.end - self.start).sum(axis=1)]

    @property
    def idle_share(self):
        """Share of all ranks' time in which nothing is computed: the bubble."""
        return float(np.mean(self.idle_share_per_rank))

    def held(self, size_per_stage=None):
        """Return the most that each rank holds for its backward passes at any moment.

        Parameters
        ----------
        size_per_stage : sequence of float, optional
            What one microbatch leaves behind in each stage (MiB, say); 1 by default, which counts microbatches.
        """
        sizes = np.ones(self.ranks * self.stages_per_rank) if size_per_stage is None else np.asarray(size_per_stage)
        frees = W if SCHEDULES[self.schedule].splits_backward else B
        change = np.where(self.kind == F, 1, np.where(self.kind == frees, -1, 0)) * sizes[self.stage]
        return np.cumsum(change, axis=1).max(axis=1).tolist()

    @cached_property
    def peak_activations(self):
        """Microbatches whose activations each rank holds at the worst moment, counted stage by stage.

        A rank with two stages counts a microbatch twice when both stages hold it: each is half as much memory.
        """
        return [int(count) for count in self.held()]

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
        border between two stages. Stages of one rank hand over at once.

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
            f"allowed: one of each a stage, and a multiple of {ranks} stages"
        )
    stages_per_rank = check_schedule(schedule, ranks, microbatches, stages // ranks)
    shape = (schedule, ranks, microbatches, stages_per_rank)
    orders = [order_arrays(schedule, rank, ranks, microbatches, stages_per_rank) for rank in range(ranks)]
    kind, stage, microbatch = (np.stack([order[column] for order in orders]) for column in range(3))
    duration = _durations(SCHEDULES[schedule].splits_backward, forward, backward, weight)[kind, stage]
    needs, delay = _needs(kind, stage, microbatch, shape, communication)
    start = _run(kind, stage, microbatch, duration, needs, delay, stages * microbatches)
    return Simulation(schedule, ranks, stages_per_rank, microbatches, kind, stage, microbatch, start, start + duration)


def _durations(splits, forward, backward, weight):
    """Return the seconds of every kind of operation on every stage, an array of shape (4, stages)."""
    if weight is None:
        weight = np.full(len(forward), 0.5)
        weight[0] = 1.0
    share = np.broadcast_to(np.asarray(weight, dtype=float), forward.shape)
    return np.stack([forward, backward, (1 - share) * backward, share * backward])


def _needs(kind, stage, microbatch, shape, communication):
    """Return, for each operation, the number of the result it waits for, and how long that takes to arrive.

    Result s * M + m is the forward of microbatch m through stage s, result S * M + s * M + m its backward; the
    last number, 2 * S * M, stands for "nothing", which is there from the start.
    """
    schedule, ranks, microbatches, stages_per_rank = shape
    last = ranks * stages_per_rank - 1
    rank_of = np.asarray(placement(schedule, ranks, stages_per_rank))
    border = np.zeros(last + 2)  # border s lies between stages s-1 and s
    border[1 : last + 1] = np.where(rank_of[1:] != rank_of[:-1], communication, 0.0)
    results = (last + 1) * microbatches
    after_forward = (kind == F) & (stage > 0)
    after_backward = ((kind == B) | (kind == I)) & (stage < last)
    needs = np.full(kind.shape, 2 * results)
    needs = np.where(after_forward, (stage - 1) * microbatches + microbatch, needs)
    needs = np.where(after_backward, results + (stage + 1) * microbatches + microbatch, needs)
    delay = np.where(after_forward, border[stage], 0.0) + np.where(after_backward, border[stage + 1], 0.0)
    return needs, delay


def _run(kind, stage, microbatch, duration, needs, delay, results):
    """Return every operation's start.

    All ranks are looked at together: each whose next operation has what it needs takes it, and so on until all are
    done. One such sweep is a few array operations, so hundreds of ranks cost hardly more than two.
    """
    ranks, length = kind.shape
    microbatches = results // (stage.max() + 1)
    gives = np.where(kind == F, 0, results) + stage * microbatches + microbatch
    gives[kind == W] = 2 * results + 1  # a weight gradient is for nobody else
    finished = np.full(2 * results + 2, np.inf)
    finished[2 * results] = 0.0
    start = np.zeros((ranks, length))
    flat_needs, flat_delay, flat_duration = needs.ravel(), delay.ravel(), duration.ravel()
    flat_gives, flat_start = gives.ravel(), start.ravel()
    free, at = np.zeros(ranks), np.arange(ranks) * length
    ends_at, waiting = at + length, np.arange(ranks)
    while len(waiting):
        here = at[waiting]
        arrives = finished[flat_needs[here]] + flat_delay[here]
        ready = np.isfinite(arrives)
        if not ready.any():
            raise RuntimeError(f"this order never ends: rank {waiting[0]} waits for an operation that waits for it")
        going, here = waiting[ready], here[ready]
        flat_start[here] = begin = np.maximum(arrives[ready], free[going])
        free[going] = finished[flat_gives[here]] = begin + flat_duration[here]
        at[going] += 1
        waiting = waiting[at[waiting] < ends_at[waiting]]
    return start

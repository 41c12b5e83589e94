"""Simulate a schedule: when does every rank compute what, how long is the step, how long does each rank wait?

The rule is short. A rank works through its list of operations in order; an operation starts when the rank is free and
what it needs has arrived: a forward needs the stage before, a backward the stage after, the weight gradient nothing but
its own rank. The lists are those of PyTorch's own schedules (`order`), or yours (`simulate_order`). Taught in
notebooks/31_microbatches.ipynb.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from types import SimpleNamespace

from mpdemo.errors import UserError
from mpdemo.settings.schedules import check_schedule, usual_stages_per_rank

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # stage, kind, microbatch, as PyTorch writes them


@dataclass(frozen=True)
class Simulation:
    """A simulated training step.

    `events` is its timeline, rows sorted by rank and start, as `mpdemo.training.recorder` records it of a real step.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    microbatches: int
    events: list

    @cached_property
    def step_time(self):
        """Seconds from the first operation's start to the last one's end."""
        return max(row["end"] for row in self.events)

    @cached_property
    def idle_share(self):
        """Share of all ranks' time in which nothing is computed: the bubble."""
        return 1 - sum(row["end"] - row["start"] for row in self.events) / self.ranks / self.step_time

    @cached_property
    def peak_activations(self):
        """The most microbatches whose activations each rank holds at a time, counted stage by stage.

        A rank with two stages counts a microbatch twice when both stages hold it: each is half as much memory.
        """
        frees = "W" if any(row["kind"] == "W" for row in self.events) else "B"
        held, peaks = [0] * self.ranks, [0] * self.ranks
        for row in self.events:
            rank = row["rank"]
            held[rank] += (row["kind"] == "F") - (row["kind"] == frees)
            peaks[rank] = max(peaks[rank], held[rank])
        return peaks


def simulate(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    ranks: int,
    weight: float | Sequence[float] | None = None,
    communication: float | Sequence[float] = 0.0,
) -> Simulation:
    """Simulate one training step of a pipeline.

    Parameters
    ----------
    schedule : str
        A name in `SCHEDULES`.
    forward, backward : sequence of float
        Seconds, or any other unit, of one microbatch on each stage, as many as stages.
    microbatches, ranks : int
    weight : float or sequence of float, optional
        The share of each stage's backward pass that is the weight gradient, one number or one for each stage; only
        zero-bubble schedules split it. By default it is half, and all on the first stage: that stage's input needs no
        gradient, so the library computes its whole backward pass when the weight gradient's turn comes.
    communication : float or sequence of float
        The time until another rank can use a result, one number or one for each stage boundary; 0 between two stages
        of one rank.

    Raises
    ------
    UserError
        The schedule cannot run with so many stages or microbatches.

    Examples
    --------
    >>> simulate("GPipe", forward=[1, 1], backward=[2, 2], microbatches=4, ranks=2).step_time
    15.0
    """
    stages = len(forward)
    if len(backward) != stages or stages == 0 or stages % ranks:
        raise UserError(
            f"{stages} forward and {len(backward)} backward times for {ranks} ranks; "
            f"allowed: one of each per stage, and a multiple of {ranks} stages"
        )
    schedule, stages_per_rank = check_schedule(schedule, ranks, microbatches), stages // ranks
    usual, several = usual_stages_per_rank(schedule), schedule.startswith("Interleaved")
    if stages_per_rank < 2 if several else stages_per_rank != usual:
        allowed = "2 or more" if several else usual
        raise UserError(
            f"{schedule} does not run with {stages_per_rank} stages per rank; allowed: {allowed}"
        )
    share = [1.0] + [0.5] * (stages - 1) if weight is None else weight
    share = [share] * stages if isinstance(share, int | float) else share
    seconds = {"F": forward, "B": backward}
    seconds["I"] = [(1 - w) * b for w, b in zip(share, backward, strict=True)]
    seconds["W"] = [w * b for w, b in zip(share, backward, strict=True)]
    delays = [communication] * (stages - 1) if isinstance(communication, int | float) else communication
    rows = play(order(schedule, ranks, microbatches, stages_per_rank), seconds, delays)
    return Simulation(schedule, ranks, stages_per_rank, microbatches, rows)


def simulate_order(orders, forward=1.0, backward=2.0) -> list[dict]:
    """Simulate a training step in which every stage works through its own list of operations: return its timeline.

    There is one list per stage, such as ``["F0", "F1", "B0", "B1"]``: the forward and the backward pass of every
    microbatch, each once. All stages are equally fast. A `UserError` says that a stage misses an operation or has one
    twice, or that every stage waits for another one: a deadlock.
    """
    lanes = [[_read(stage, text) for text in texts] for stage, texts in enumerate(orders)]
    count = 1 + max((microbatch for lane in lanes for _, _, microbatch in lane), default=-1)
    if not count:
        raise UserError("there is no operation; write one list per stage, such as ['F0', 'B0']")
    for stage, lane in enumerate(lanes):
        for kind, microbatch in product("FB", range(count)):
            if (times := lane.count((kind, stage, microbatch))) != 1:
                raise UserError(
                    f"stage {stage} has {kind}{microbatch} {times} times; each operation is done once"
                )
    return play(
        lanes, {"F": [forward] * len(lanes), "B": [backward] * len(lanes)}, [0.0] * (len(lanes) - 1)
    )


def _read(stage, text):
    """Return kind, stage and microbatch of an operation such as F0."""
    if not (match := re.fullmatch(r"([FB])(\d+)", str(text))):
        raise UserError(
            f"stage {stage} has {text!r}; allowed: F or B and the number of a microbatch, such as F0"
        )
    return match[1], stage, int(match[2])


def play(lanes, seconds, delays) -> list[dict]:
    """Let every rank work through its list; `seconds` are by kind and stage, `delays` by stage boundary."""
    owner = {stage: rank for rank, lane in enumerate(lanes) for _, stage, _ in lane}
    last = max(owner)
    arrive = [0.0 if owner[s] == owner[s + 1] else float(delays[s]) for s in range(last)]
    ends, rows, free, left, done = {}, [], [0.0] * len(lanes), [deque(lane) for lane in lanes], -1
    while done < len(rows):
        done = len(rows)
        for rank, lane in enumerate(left):
            while lane and ends.keys() >= set(needed := needs(lane[0], last)):
                kind, stage, microbatch = lane.popleft()
                arrived = [
                    ends[need] + (arrive[min(stage, need[1])] if need[1] != stage else 0.0)
                    for need in needed
                ]
                start = max([free[rank], *arrived])
                free[rank] = ends["B" if kind == "I" else kind, stage, microbatch] = start + float(
                    seconds[kind][stage]
                )
                row = {"rank": rank, "stage": stage, "kind": kind, "microbatch": microbatch}
                rows.append(row | {"start": start, "end": free[rank]})
    if waiting := [lane[0] for lane in left if lane]:
        raise UserError(f"deadlock: {'; '.join(_waits(operation, last, ends) for operation in waiting)}")
    return sorted(rows, key=lambda row: (row["rank"], row["start"]))


def needs(operation, last):
    """Return the operations that must have ended before this one; of a backward pass in two, I counts as B."""
    kind, stage, microbatch = operation
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("B", stage, microbatch)]
    return [("F", stage, microbatch)] + ([("B", stage + 1, microbatch)] if stage < last else [])


def _waits(operation, last, ends):
    """Say what an operation waits for."""
    kind, stage, microbatch = operation
    missing = next(need for need in needs(operation, last) if need not in ends)
    place = "itself" if missing[1] == stage else f"stage {missing[1]}"
    return (
        f"stage {stage} wants to do {kind}{microbatch}, and waits for {missing[0]}{missing[2]} of {place}"
    )


@cache
def order(schedule, ranks, microbatches, stages_per_rank=1) -> list:
    """Ask PyTorch for the operations of every rank: lists of (kind, stage, microbatch).

    F is the forward pass of a microbatch through a stage, B its backward pass. The zero-bubble schedules cut B in two:
    I, the gradient of the stage's input, which the stage before waits for, and W, the gradient of its weights, which
    fills gaps. The library decides all of that when a schedule is made, before it needs a process group.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(group_size=ranks, group_rank=0, num_stages=ranks * stages_per_rank, stage_index=number,
                        is_first=number == 0, is_last=False, submod=None, has_backward=True)
        for number in range(stages_per_rank)
    ]  # fmt: skip
    made = get_schedule_class(schedule)(stages if stages_per_rank > 1 else stages[0], microbatches)
    matches = [
        [ACTION.fullmatch(str(action)) for action in made.pipeline_order[rank]] for rank in range(ranks)
    ]
    lanes = [[(match[2], int(match[1]), int(match[3])) for match in lane if match] for lane in matches]
    return [_counted_from_zero(lane) for lane in lanes]


def _counted_from_zero(lane):
    """Repair the list of 1F1B's last rank, whose forwards PyTorch 2.14 numbers from 1 (it does not run by the list)."""
    first = min((microbatch for kind, _, microbatch in lane if kind == "F"), default=0)
    return [(kind, stage, microbatch - first * (kind == "F")) for kind, stage, microbatch in lane]

"""Test of the program in notebook 55: a loop that decides when to save."""
# ruff: noqa: F821 - what the reader's program defines

import math
import time

from checks.helpers import close, substitute

BETWEEN = 60_000.0  # s from one failure of a GPU to its next
COSTS = (12, 12, 12, 108, 108)  # s of the first saves; every later one takes 12 s, too
LONG, SHORT, TURN = 20.0, 10.0, 330  # s of a step, and of one after step 330
LAST = 540


class Apart(Exception):
    """The ranks have decided differently."""


class Job:
    """A job whose ranks meet in every step and save; its clocks are ours, and rank r's is fast by r times 2 %."""

    def __init__(self, program, rank, n):
        self.now, self.calls, self.rank, self.n = 1e6, [], rank, n
        self.gaps, self.works, self.firsts = [], 0.0, []  # between saves: seconds of training; steps
        for name in ("time", "monotonic", "perf_counter"):
            substitute(program, time, name, self.read)

    def read(self):
        """Return the time by this rank's clock."""
        return self.now * (1 + 0.02 * self.rank)

    def meet(self, what):
        """Require that all ranks do the same, without a collective of the reader's group."""
        store, number = dist.distributed_c10d._get_default_store(), len(self.calls)
        self.calls.append(what)
        store.set(f"call {number} {self.rank}", what)
        all_do = [store.get(f"call {number} {rank}").decode() for rank in range(self.n)]
        said = f"After step {self.calls.count('trains') - (what == 'trains')}, " + ", ".join(
            f"rank {rank} {does}" for rank, does in enumerate(all_do)
        )
        if len(set(all_do)) > 1:
            raise Apart(f"{said}. In a real job, all of them now hang.")

    def step(self):
        self.meet("trains")
        seconds = LONG if self.calls.count("trains") <= TURN else SHORT
        self.now, self.works = self.now + seconds, self.works + seconds

    def save(self):
        self.meet("saves")
        self.firsts.append(self.calls.count("trains"))
        self.gaps, self.works = [*self.gaps, self.works], 0.0
        self.now += [*COSTS, *[12] * LAST][len(self.gaps) - 1]


def test_55_2(rank, n):
    job = Job(program, rank, n)
    try:
        train(LAST, job.step, job.save, BETWEEN)
    except Apart as error:
        raise AssertionError(f"{error} Who decides, and by which clock?") from None
    assert job.calls.count("trains") == LAST, f"It does {job.calls.count('trains')} steps and not {LAST}."
    assert job.gaps, "It never saves."
    assert job.firsts[0] == 1, (
        f"Its first save comes after step {job.firsts[0]}: until then it can't know the cost."
    )
    gaps, costs = job.gaps[1:], [*COSTS, *[12] * LAST]
    assert gaps, "After its first save, it never saves again."
    every = "It saves after every step: what does it think that a save costs?"
    assert len(gaps) < 2 or gaps[:2] != [LONG, LONG], every
    wanted = [math.sqrt(2 * cost * BETWEEN / n) for cost in costs]
    times = gaps[0] / wanted[0]
    alone = f"It waits {gaps[0]:.0f} s: right for a job that fails every {BETWEEN:.0f} s. "
    alone += f"One GPU does; {n} fail sooner."
    assert not close(times, math.sqrt(n), 0.08), alone
    half = f"It waits {gaps[0]:.0f} s instead of {wanted[0]:.0f}: where is the 2 under the root?"
    assert not close(times, math.sqrt(0.5), 0.06), half
    assert close(times, 1, 0.06), (
        f"After a save of {costs[0]} s it trains {gaps[0]:.0f} s, not {wanted[0]:.0f}."
    )
    for number, (gap, right) in enumerate(zip(gaps, wanted, strict=False)):
        said = f"Save {number + 1} took {costs[number]} s, and the next came after {gap:.0f} s of training"
        steps = job.firsts[number + 1] - job.firsts[number]
        if not close(gap, right, 0.045):
            begins = f"{said}, not {right:.0f}: it counts from the save's begin, and a save is no progress."
            assert not close(gap, right - costs[number], 0.02), begins
            assert not close(gap, gaps[0], 0.03), f"{said}, as if saves still cost what the first one did."
            assert steps != job.firsts[1] - job.firsts[0], (
                f"{said}: it counts steps, and these are shorter now."
            )
            raise AssertionError(f"{said}, not {right:.0f}.")
    return (
        f"It saved {len(job.gaps)} times, and all {n} ranks in the same steps although their clocks differ."
    )

"""Tests of the programs in notebook 90: a complete checkpoint, one of all ranks, and how often to save."""
# ruff: noqa: F821 - what the reader's program defines

import math
import time
from types import SimpleNamespace

import torch
from torch import nn

from checks.helpers import close, gathered, slow_saves, substitute

BATCHES, STEPS = 5, 12  # batches of an epoch, steps of the uninterrupted run


def new_training(seed):
    """Return a toy training at its start: dropout, AdamW, a falling learning rate, shuffled batches."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, done=0)


def steps_of(training, steps):
    """Train for some steps; return for each one its place, its learning rate and its loss."""
    images, rows = torch.randn(BATCHES, 8, 4, generator=torch.Generator().manual_seed(1)), []
    for _ in range(steps):
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(training.epoch))
        batch = images[order[training.done]]
        loss = (training.model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()
        place = f"batch {training.done} of epoch {training.epoch}"
        rows.append((place, training.optimizer.param_groups[0]["lr"], loss.item()))
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        epochs, training.done = divmod(training.done + 1, BATCHES)
        training.epoch += epochs
    return rows


def test_90_1(rank, n):
    whole = steps_of(new_training(0), STEPS)
    for stop in (3, 5, 9):  # within the first epoch, at its end, within the second
        path, training, after = folder / f"{stop}.pt", new_training(0), f"Stopped after {stop} steps"
        steps_of(training, stop)
        save(training, path)
        resumed = new_training(1)
        load(resumed, path)
        same = all(map(torch.equal, training.model.parameters(), resumed.model.parameters()))
        assert same, f"{after}: after load, the new training doesn't have the saved weights."
        rows = zip(steps_of(resumed, STEPS - stop), whole[stop:], strict=True)
        for step, ((place, rate, loss), (right_place, right_rate, right_loss)) in enumerate(rows, stop + 1):
            assert place == right_place, f"{after}: step {step} trains on {place}, not on {right_place}."
            rates = f"{after}: step {step} has the learning rate {rate:.4f}, not {right_rate:.4f}."
            assert close(rate, right_rate, 1e-9), rates
            dropout = f"step {step} has the right weights and images, but dropout draws other zeros."
            later = (
                f"step {step - 1} has the right loss, and then the weights move differently than before."
            )
            assert loss == right_loss, f"{after}: {dropout if step == stop + 1 else later}"


def test_90_2(rank, n):
    path = folder / "checkpoint.pt"
    with slow_saves() as saved:
        save({f"weight{rank}": torch.full((2,), float(rank))}, path, rank, n)
        there = path.exists()
        names = sorted(torch.load(path)) if there else []
        wait_for_all()
    counts = sorted(map(len, gathered(saved)))
    assert counts != [1, 1], "Both ranks wrote the file, at the same time and under the same name."
    assert counts == [0, 1], f"The ranks wrote {counts[1]} and {counts[0]} files."
    assert there, f"Rank {rank} came back from save, and the file wasn't there yet."
    assert names == ["weight0", "weight1"], f"The file holds {', '.join(names) or 'nothing'}."


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


def test_90_4(rank, n):
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

"""Test of the program in notebook 52: a complete checkpoint."""
# ruff: noqa: F821 - what the reader's program defines

from types import SimpleNamespace

import torch
from torch import nn

from checks.helpers import close

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


def test_52_1(rank, n):
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

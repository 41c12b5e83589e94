"""Test of the program in sitting 10: a training loop for one device that has become one for several."""
# ruff: noqa: F821 - what the reader's program defines

import copy
import io
from contextlib import redirect_stdout

import torch
from torch import nn
from torch.utils.data import TensorDataset

from checks.helpers import close, gathered

SAMPLES, BATCH, EPOCHS = 54, 12, 2  # the last batch of an epoch has 6


def stepping(model, seen):
    """Return a function that trains on a batch, returns its loss, and notes both."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(net, x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        seen.append(((SAMPLES * x[:, 0]).round().int().tolist(), loss.item()))
        return loss.item()

    return step


def test_10_1(rank, n):
    torch.manual_seed(0)
    x = torch.cat([torch.arange(SAMPLES)[:, None] / SAMPLES, torch.randn(SAMPLES, 3)], dim=1)
    y, model, seen, said = x.sum(1, keepdim=True).sin(), nn.Linear(4, 1), [], io.StringIO()
    alone = copy.deepcopy(model)
    with redirect_stdout(said):
        train(TensorDataset(x, y), model, stepping(model, seen), EPOCHS)
    noted = gathered((seen, said.getvalue().splitlines(), model.weight.tolist()))
    steps, printed, weights = zip(*noted, strict=True)
    orders = [[sum((numbers for numbers, _ in part), []) for part in epochs_of(row)] for row in steps]
    shared = len({*orders[0][0]} & {*orders[1][0]})
    assert not shared, f"In an epoch both processes train on {shared} samples that are the same."
    size = sum(len(row[0][0]) for row in steps)
    assert size == BATCH, f"A step of both processes has {size} samples, and a step of one has {BATCH}."
    assert weights[0] == weights[1], (
        "The processes end with different models: nothing averages their gradients."
    )
    assert orders[0][0] != orders[0][1], "Both epochs have the same order."
    lines = [len(text) for text in printed]
    assert lines == [EPOCHS, 0], f"In {EPOCHS} epochs the processes print {lines[0]} and {lines[1]} lines."
    for epoch, text in enumerate(printed[0]):
        mean = (
            sum(len(numbers) * loss for row in steps for numbers, loss in epochs_of(row)[epoch]) / SAMPLES
        )
        told = f"Rank 0 prints {text!r}, but the mean loss of all {SAMPLES} samples is {mean:.4f}."
        assert close(float(text.split()[-1]), mean, 0.001), told
    step = stepping(alone, [])
    for batch in zip(*steps, strict=True):
        numbers = sum((numbers for numbers, _ in batch), [])
        step(alone, x[numbers], y[numbers])
    same = torch.allclose(alone.weight, torch.tensor(weights[0]), atol=1e-5)
    assert same, "One device with the same batches ends with other weights."


def epochs_of(row):
    """Return the steps of each of the epochs."""
    return row[: len(row) // EPOCHS], row[len(row) // EPOCHS :]

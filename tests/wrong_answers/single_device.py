"""Typical wrong answers to the exercises of notebook 01, each of which the check must refuse."""

import torch


def not_divided(model, optimizer, loss_fn, images, labels, parts):
    optimizer.zero_grad()
    for part, target in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        loss_fn(model(part), target).backward()
    optimizer.step()


def cleared_inside(model, optimizer, loss_fn, images, labels, parts):
    for part, target in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        optimizer.zero_grad()
        (loss_fn(model(part), target) / parts).backward()
    optimizer.step()


def step_inside(model, optimizer, loss_fn, images, labels, parts):
    for part, target in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        optimizer.zero_grad()
        (loss_fn(model(part), target) / parts).backward()
        optimizer.step()


def never_cleared(model, optimizer, loss_fn, images, labels, parts):
    for part, target in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        (loss_fn(model(part), target) / parts).backward()
    optimizer.step()


def one_backward(model, optimizer, loss_fn, images, labels, parts):
    optimizer.zero_grad()
    chunks = zip(images.chunk(parts), labels.chunk(parts), strict=True)
    sum(loss_fn(model(part), target) / parts for part, target in chunks).backward()
    optimizer.step()


def mean_of_batches(model, loader):
    model.eval()
    shares = [(model(images).argmax(1) == labels).float().mean().item() for images, labels in loader]
    return sum(shares) / len(shares)


def full_batches(model, loader):
    model.eval()
    return sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader) / (len(loader) * 4)


def in_training_mode(model, loader):
    answers = torch.cat([model(images).argmax(1) == labels for images, labels in loader])
    return answers.float().mean()


LOOP = """
def train(model, optimizer, loss_fn, batches):
    losses = []
    {before}
    for images, labels in batches:
        {first}
        loss = loss_fn(model(images), labels)
        loss.backward()
        {last}
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
CLOCK = """
import time

def measure(device, batches):
    losses = []
    begin = time.perf_counter()
    for batch in batches:
        losses.append(device.launch(batch){each})
    seconds = time.perf_counter() - begin
    losses = [{read} for loss in losses]
    return losses, seconds / len(losses)
"""

WRONG = {
    "01.1": [-15.0, 30.0, 0.0],
    "01.2": [not_divided, cleared_inside, step_inside, never_cleared, one_backward],
    "01.3": [
        LOOP.format(before="optimizer.zero_grad()", first="pass", last="pass"),
        LOOP.format(before="pass", first="pass", last="optimizer.zero_grad()"),
        LOOP.format(before="optimizer.zero_grad()", first="pass", last="for p in model.parameters(): p.grad /= 2"),
    ],
    "01.4": [2.0, 5.0, 6.0],
    "01.5": [CLOCK.format(each=".item()", read="loss"), CLOCK.format(each="", read="loss.item()")],
    "01.6": [
        {0: 180, 1: 120, 2: 60, 4: 30},
        {0: 180, 1: 180, 2: 120, 4: 90},
        {0: 120, 1: 120, 2: 60, 4: 60},
        {0: 180, 1: 60, 2: 60, 4: 60},
    ],
    "01.7": [(2, 1), (1, 1), (2, 2)],
    "01.8": [13.6, 40.9, 57.2],
    "01.9": [655, 64, 10_000],
    "01.10": [mean_of_batches, full_batches, in_training_mode],
    "01.11": [0.9, 1.0, -2.3],
}

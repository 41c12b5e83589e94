"""What the checks of notebook 01 run: the reader's program in a process, or a function on a small model."""

import copy
import time

DEVICE_SECONDS, STEPS = 0.010, 20  # of the toy device in 01.5


def accumulation_result(function, parts) -> dict:
    """Run `function` on 12 images, with an older gradient in place; None is one plain step on the whole batch.

    Returns
    -------
    dict
        One weight's gradient at the optimizer's step, that of the last part alone, the older one, how many steps
        the optimizer made, how many backward passes there were, and how many images each forward pass took.
    """
    import torch
    from torch.nn.functional import cross_entropy

    images, labels = torch.linspace(-1, 1, 36).reshape(12, 3).sin(), torch.arange(12) % 3
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 9).reshape(3, 3))
        model.bias.zero_()
    cross_entropy(model(images[-4:]), labels[-4:]).backward()
    older = model.weight.grad[0, 0].item()
    last_part = cross_entropy(model(images[-12 // parts :]), labels[-12 // parts :])
    last = torch.autograd.grad(last_part, model.weight)[0][0, 0].item()
    optimizer, seen, sizes = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    passes = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(copy.deepcopy(model.weight.grad)))  # it may change later
    model.weight.register_hook(lambda _: passes.append(1))
    model.register_forward_hook(lambda layer, inputs, outputs: sizes.append(len(inputs[0])))
    if function:
        function(model, optimizer, cross_entropy, images, labels, parts)
    else:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    gradient = seen[0][0, 0].item() if seen and seen[0] is not None else 0.0
    counts = {"steps": len(seen), "backward passes": len(passes), "sizes": sizes}
    return {"gradient": gradient, "last part": last, "older": older} | counts


def drive_loop(program, rank, world_size):
    """Train a small network with the reader's loop, with a right one and with one that never clears gradients."""
    import torch
    from torch.nn.functional import cross_entropy as loss_fn

    from mpdemo import data, models

    images, labels = data.load("digits").train.tensors
    batches = list(zip(images.split(128), labels.split(128), strict=True)) * 6  # epochs

    def losses_of(loop):
        model = models.build("toy")
        before = [parameter.clone() for parameter in model.parameters()]
        losses = loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batches)
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return [float(loss) for loss in losses], moved

    losses, moved = losses_of(program.train)
    right, never_cleared = (losses_of(lambda *parts, clear=clear: _loop(*parts, clear))[0] for clear in (True, False))
    return {"losses": losses, "moved": moved, "right": right, "never cleared": never_cleared}


def _loop(model, optimizer, loss_fn, batches, clear):
    losses = []
    for images, labels in batches:
        if clear:
            optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def drive_clock(program, rank, world_size):
    """Let the reader's program measure a toy device; return what it reports, and when the host waited."""
    from mpdemo.labs.toy_device import ToyDevice

    def batches():
        for number in range(STEPS):
            time.sleep(0.002)  # the host loads a batch
            yield number

    device = ToyDevice(DEVICE_SECONDS)
    losses, reported = program.measure(device, batches())
    losses = [loss if isinstance(loss, int | float) else str(type(loss).__name__) for loss in losses]
    return {"losses": losses, "waits": device.waits, "reported": float(reported)}


def accuracy_case():
    """Return a model with batch norm, batches of 4, 4 and 2 images, its accuracy, and what typical mistakes give."""
    import torch
    from torch import nn

    values = torch.tensor([1.0, 2, 3, -1, 5, 6, 7, 8, -3, -4]).unsqueeze(1)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-1.0], [1.0]]))  # answers 1 where the number is above 0
    labels = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    loader = list(zip(values.split(4), labels.split(4), strict=True))

    def shares(training):
        model.train(training)
        with torch.no_grad():
            return [(model(images).argmax(1) == labels).double().mean().item() for images, labels in loader]

    def total(shares):
        return sum(share * len(labels) for share, (_, labels) in zip(shares, loader, strict=True))

    evaluated, in_training = shares(False), total(shares(True)) / 10
    model[0].reset_running_stats()
    model.train()
    right = total(evaluated)
    return model, loader, right / 10, sum(evaluated) / 3, right / 12, in_training

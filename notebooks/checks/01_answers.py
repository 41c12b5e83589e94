"""Checks of notebook 01: accumulation and accuracy."""

import copy
import math


def check_01_1(accumulate):
    whole = accumulated(None, parts=1)[0]
    for parts in (3, 4):
        gradient, steps, passes, sizes, last, older = accumulated(accumulate, parts)
        assert steps, "The optimizer never made its step: no weight has moved."
        assert steps == 1, f"The optimizer made {steps} steps for one batch of {parts} parts."
        assert sum(sizes) == 12, f"Of 12 images the model saw {sum(sizes)}."
        assert max(sizes) <= 12 // parts, f"The model saw {max(sizes)} of 12 images in one forward pass."
        times, of_last = gradient / whole, last / whole
        many = f"With {parts} parts the gradient is {times:.3g} times that of the whole batch"
        assert not math.isclose(times, parts, rel_tol=0.01), f"{many}, once for each part."
        only_last = any(math.isclose(times, value, rel_tol=0.01) for value in (of_last, of_last / parts))
        assert not only_last, f"Only the gradient of the last of {parts} parts is left when the optimizer steps."
        assert not math.isclose(times, 1 + older / whole, rel_tol=0.01), f"{many}: an older one was still in .grad."
        assert math.isclose(times, 1, rel_tol=0.01), f"{many}."
        kept = f"{parts} parts went through {passes} backward pass together: until then all activations were kept."
        assert passes >= parts, kept


def accumulated(function, parts):
    """Run a step on 12 images, with an older gradient in place; None is one plain step on the whole batch.

    Returns one weight's gradient at the optimizer's step, the steps, backward passes and images of each forward pass,
    and the same weight's gradient of the last part alone, and the older one.
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
    optimizer, seen, passes, sizes = torch.optim.SGD(model.parameters(), lr=0.1), [], [], []
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
    return gradient, len(seen), len(passes), sizes, last, older


def check_01_5(accuracy):
    model, loader, right, known = accuracy_case()
    value = float(accuracy(model, loader))
    for number, message in known.items():
        assert not math.isclose(value, number, rel_tol=0.01), f"{value:.3f} {message}"
    assert value <= 1, f"{value:.3g} is no share of the images: divide the correct predictions by all images."
    share = f"{value:.3f} isn't the share of correct predictions among all 10 images."
    assert math.isclose(value, right, rel_tol=0.01), share


def accuracy_case():
    """Return a model with batch norm, batches of 4, 4 and 2 images, its accuracy, and what typical mistakes give."""
    import torch
    from torch import nn

    values = torch.tensor([1.0, 2, 3, -1, 5, 6, 7, 8, -3, -4]).unsqueeze(1)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-1.0], [1.0]]))  # predicts 1 where the number is above 0
    labels = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    loader = list(zip(values.split(4), labels.split(4), strict=True))

    def correct(training):
        model.train(training)
        with torch.no_grad():
            return [(model(images).argmax(1) == labels).sum().item() for images, labels in loader]

    evaluated, in_training = correct(False), correct(True)
    model[0].reset_running_stats()
    model.train()
    mistakes = {
        evaluated[0] / 12
        + evaluated[1] / 12
        + evaluated[2] / 6: "is the mean of the batches' accuracies: the last batch has 2 images.",
        sum(evaluated) / 12: "divides by 3 batches of 4 images; there are 10 images.",
        sum(in_training) / 10: "belongs to training mode: a prediction depends on the other images of the batch.",
    }
    return model, loader, sum(evaluated) / 10, mistakes

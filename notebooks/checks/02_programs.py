"""Tests of the programs in notebook 02: a loss from several devices, and the sum of their gradients."""
# ruff: noqa: F821 - what the reader's program defines

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import close, ratio, require_gradients


def test_02_1(rank, n):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    for count, devices in ((12, 4), (10, 4), (10, 8)):
        images, labels, sizes = torch.randn(count, 5), torch.arange(count) % 3, []
        noting = model.register_forward_hook(lambda _, inputs, __, sizes=sizes: sizes.append(len(inputs[0])))
        loss = mean_loss(model, images, labels, devices)
        noting.remove()
        wanted, parts = cross_entropy(model(images), labels), [len(part) for part in images.chunk(devices)]
        case = f"{count} images on {devices} devices"
        assert sizes == parts, f"{case}: the models saw {sizes} images, but the parts hold {parts}."
        said = f"{case}, in parts of {parts}: the loss is {float(loss):.3f}, and the whole batch's is {wanted:.3f}."
        assert close(float(loss), wanted.item(), 1e-4), said
        assert loss.requires_grad, "Nothing can be learned from this loss: it is cut off from the model."


def test_02_2(rank, n):
    torch.manual_seed(0)
    model, images, labels = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), torch.randn(12, 5), torch.arange(12) % 3
    whole, first = copy.deepcopy(model), copy.deepcopy(model)
    cross_entropy(whole(images), labels).backward()
    (cross_entropy(first(images[:4]), labels[:4]) / 3).backward()
    gradients(model, images, labels, 3)
    own, of_whole, of_first = ([parameter.grad for parameter in each.parameters()] for each in (model, whole, first))
    assert not close(ratio(own, of_first), 1, 1e-4), "The model has the gradients of the first part only."
    require_gradients(own, of_whole, "With 3 copies")

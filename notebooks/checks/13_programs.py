"""Test of the program in sitting 13: a loss from several devices."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import close


def test_13_1(rank, n):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    for count, devices in ((12, 4), (10, 4), (10, 8)):
        images, labels, sizes = torch.randn(count, 5), torch.arange(count) % 3, []
        noting = model.register_forward_hook(
            lambda _, inputs, __, sizes=sizes: sizes.append(len(inputs[0]))
        )
        loss = mean_loss(model, images, labels, devices)
        noting.remove()
        wanted, parts = cross_entropy(model(images), labels), [len(part) for part in images.chunk(devices)]
        case = f"{count} images on {devices} devices"
        assert sizes == parts, f"{case}: the models saw {sizes} images, but the parts hold {parts}."
        said = f"{case}, in parts of {parts}: the loss is {float(loss):.3f}, and the whole batch's is {wanted:.3f}."
        assert close(float(loss), wanted.item(), 1e-4), said
        assert loss.requires_grad, "Nothing can be learned from this loss: it is cut off from the model."

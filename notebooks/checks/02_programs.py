"""Tests of the programs in notebook 02: scatter, apply and gather; copies of a model; the sum of their gradients."""
# ruff: noqa: F821 - what the reader's program defines

import copy
import threading

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import MISSING, close, ratio


def test_02_2(rank, n):
    products, shared = [], []

    class Watched(torch.Tensor):
        """Notes how large every product is, whether the main thread computed it, and whether with w itself."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function.__name__.strip("_") in ("mul", "rmul", "multiply"):
                in_main = threading.current_thread() is threading.main_thread()
                products.append((max(tensor.numel() for tensor in args), in_main))
                shared.append(any(tensor.data_ptr() == w.data_ptr() for tensor in args))
            return super().__torch_function__(function, types, args, kwargs)

    x, w = torch.arange(1.0, 11), torch.tensor(2.0, requires_grad=True)
    outputs = outputs_of(w, x.as_subclass(Watched), 4)
    kind = type(outputs).__name__
    assert isinstance(outputs, torch.Tensor), f"With ten numbers on 4 devices it returns a {kind}, not one tensor."
    values, wanted, sizes = outputs.tolist(), (2 * x).tolist(), [size for size, _ in products]
    lost = ": the order of the images is lost." if sorted(values) == wanted else "."
    assert values == wanted, f"w = 2 and x = 1 to 10 gave {values}{lost}"
    assert sizes != [10], "One product of all ten numbers was computed, so the work isn't shared."
    few = f"On 4 devices it computed {len(sizes)} products, of {sizes} numbers. Each device makes one product."
    assert len(sizes) == 4, few
    assert not any(shared), "A device computes with w itself instead of a copy of it."
    assert not all(main for _, main in products), "The main thread computed every product, one by one."
    if outputs.requires_grad:
        outputs.as_subclass(torch.Tensor).mean().backward()
    assert w.grad is not None, "No gradient arrives at w: the copies are cut off from it (detach?)."
    gradient = w.grad.item()
    same = close(gradient, 5.5, 1e-5)
    assert same, f"The gradient of the mean output is {gradient}; for w * x it is another one."


def small_model():
    """Return a model with a buffer, 12 inputs and their labels, the same in every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return model, torch.randn(12, 5), torch.randint(0, 3, (12,))


def test_02_3(rank, n):
    model, images, labels = small_model()
    model[1] = nn.Identity()  # batch norm would depend on the part that a copy sees
    whole, first = copy.deepcopy(model), copy.deepcopy(model)
    cross_entropy(whole(images), labels).backward()
    (cross_entropy(first(images[:4]), labels[:4]) / 3).backward()
    gradients(model, images, labels, 3)
    own = [parameter.grad for parameter in model.parameters()]
    first_part = ratio(own, [parameter.grad for parameter in first.parameters()])
    assert first_part != MISSING, "A parameter of the model has no gradient."
    lost = "With 3 copies the model has the gradients of the first part only; those of the other copies are lost."
    assert first_part is None or not close(first_part, 1, 1e-4), lost
    for (name, parameter), right in zip(model.named_parameters(), whole.parameters(), strict=True):
        factor, gradient = (ratio([parameter.grad], [right.grad]), f"With 3 copies the gradient of {name}")
        assert factor is not None, f"{gradient} points in another direction than on one device."
        often = f"{gradient} is {factor:.2f} times the one on one device. How often is a loss divided?"
        assert close(factor, 1, 1e-4), often

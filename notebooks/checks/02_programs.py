"""Tests of the programs in notebook 02: scatter, apply and gather; copies of a model; the sum of their gradients."""
# ruff: noqa: F821 - what the reader's program defines

import copy
import threading

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import close, ratio, require_gradients


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
    values, wanted, sizes = outputs.tolist(), (2 * x).tolist(), [size for size, _ in products]
    assert values == wanted, f"w = 2 and x = 1 to 10 gave {values}: is the order of the images lost?"
    assert len(sizes) == 4, f"It computed {len(sizes)} products, of {sizes} numbers; each of 4 devices makes one."
    assert not any(shared), "A device computes with w itself instead of a copy of it."
    assert not all(main for _, main in products), "The main thread computed every product, one by one."
    if outputs.requires_grad:
        outputs.as_subclass(torch.Tensor).mean().backward()
    assert w.grad is not None, "No gradient arrives at w: the copies are cut off from it (detach?)."
    gradient = w.grad.item()
    assert close(gradient, 5.5, 1e-5), f"The gradient of the mean output is {gradient}; for w * x it is another one."


def test_02_3(rank, n):
    torch.manual_seed(0)
    model, images, labels = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), torch.randn(12, 5), torch.arange(12) % 3
    whole, first = copy.deepcopy(model), copy.deepcopy(model)
    cross_entropy(whole(images), labels).backward()
    (cross_entropy(first(images[:4]), labels[:4]) / 3).backward()
    gradients(model, images, labels, 3)
    own, of_whole, of_first = ([parameter.grad for parameter in each.parameters()] for each in (model, whole, first))
    assert not close(ratio(own, of_first), 1, 1e-4), "The model has the gradients of the first part only."
    require_gradients(own, of_whole, "With 3 copies")

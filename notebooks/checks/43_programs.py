"""Tests of the programs in notebook 43: a sharded model with adapters."""
# ruff: noqa: F821 - what the reader's program defines

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def test_43_1(rank, n):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model, one, x, y = copy.deepcopy(base), copy.deepcopy(base), torch.randn(8, 4), torch.randn(8, 3)
    mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("all", "alone"))
    optimizer = prepare(model, mesh["all"])
    frozen, trained = dict(base.named_parameters()), dict(model.named_parameters())
    free = [name for name in frozen if trained.pop(name).requires_grad]
    assert not free, f"{', '.join(free)}: not frozen."
    assert trained, "The model has no parameters but those that are frozen."
    late = [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]
    unknown = (
        f"FSDP doesn't know {', '.join(late)}: each rank would train its own. fully_shard takes the parameters that "
        "are there when it's called."
    )
    assert not late, unknown
    whole = "Only the whole model is sharded: it would be gathered all at once."
    assert all(isinstance(layer, FSDPModule) for layer in model), whole
    before = {name: parameter.full_tensor().detach().clone() for name, parameter in trained.items()}
    other = "At first the model doesn't compute what it did before: the adapters' part must begin at zero."
    assert torch.allclose(model(x), base(x), atol=1e-5), other
    alone = prepare(one, mesh["alone"])
    for name, parameter in one.named_parameters():
        if name in before:
            parameter.to_local().data.copy_(before[name])
    steps(model, optimizer, x.chunk(n)[rank], y.chunk(n)[rank])
    moved = [not torch.equal(parameter.full_tensor(), before[name]) for name, parameter in trained.items()]
    if not any(moved):
        still = all(parameter.grad.full_tensor().abs().max() == 0 for parameter in trained.values())
        zero = (
            "All gradients are zero, in every step: each is a product with the other matrix, which is zero."
        )
        assert not still, zero
    assert any(moved), (
        "Nothing has changed after three steps. Does the optimizer hold the model's tensors of now?"
    )
    steps(one, alone, x, y)
    right = dict(one.named_parameters())
    for name, parameter in trained.items():
        apart = f"After three steps {name} isn't one device's."
        assert torch.allclose(parameter.full_tensor(), right[name].to_local(), atol=1e-5), apart
    for name, parameter in frozen.items():
        changed = f"{name} has changed, though it's frozen."
        assert torch.equal(dict(model.named_parameters())[name].full_tensor(), parameter), changed


def steps(model, optimizer, x, y):
    """Train for three steps, and leave the last gradients."""
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

"""Test of a program in notebook 02: copies that stay up to date."""
# ruff: noqa: F821 - what the reader's program defines

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import substitute


def trained(model, batches, renewed=True, cleared=True):
    """Train a copy of a model in three parts, whose copies get new weights and empty gradients or not; return it."""
    model = copy.deepcopy(model)
    copies, optimizer = (
        [copy.deepcopy(model) for _ in range(2)],
        torch.optim.SGD(model.parameters(), lr=0.5),
    )
    for images, labels in batches:
        optimizer.zero_grad()
        for replica in copies:
            if renewed:
                replica.load_state_dict(model.state_dict())
            if cleared:
                replica.zero_grad()
        parts = zip((model, *copies), images.chunk(3), strict=True)
        cross_entropy(torch.cat([replica(part) for replica, part in parts]), labels).backward()
        for own, *others in zip(*(replica.parameters() for replica in (model, *copies)), strict=True):
            own.grad += sum(other.grad for other in others)
        optimizer.step()
    return model


def alike(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


def test_02_2(rank, n):
    torch.manual_seed(0)
    model, sizes, made, deepcopy = (
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        [],
        [],
        copy.deepcopy,
    )
    batches = [(torch.randn(12, 5), torch.arange(12) % 3) for _ in range(3)]
    right, stale, kept = (
        trained(model, batches, *how) for how in ((True, True), (False, True), (True, False))
    )
    one, own = deepcopy(model), deepcopy(model)
    train(one, torch.optim.SGD(one.parameters(), lr=0.5), batches[:1], 3)
    assert alike(one, trained(model, batches[:1])), "After one step the weights aren't those of one device."
    own.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))

    def counted(copied, *more):
        made.append(isinstance(copied, nn.Module))
        return deepcopy(copied, *more)

    substitute(program, copy, "deepcopy", counted)
    train(own, torch.optim.SGD(own.parameters(), lr=0.5), batches, 3)
    substitute(program, copy, "deepcopy", deepcopy)
    assert sum(made) <= 2, f"In three steps it copied the model {sum(made)} times; two copies are enough."
    assert sizes == 9 * [4], f"In three steps of 12 images on 3 devices the models saw {sizes} images."
    assert not alike(own, stale), "In later steps the copies still compute with the weights of the first."
    assert not alike(own, kept), "The copies' gradients of earlier steps are added again in later ones."
    assert alike(own, right), "After three steps the weights aren't those of one device."

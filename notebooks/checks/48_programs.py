"""Tests of the programs in notebook 48: a mixture whose experts are balanced over all ranks."""
# ruff: noqa: F821 - what the reader's program defines

from math import isnan

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from checks.helpers import close, gathered, gradients, ratio


class Layer(nn.Module):
    """A router and one of n experts: each rank has another one."""

    def __init__(self, experts, router, rank):
        super().__init__()
        self.router, self.expert = router, experts[rank]

    def forward(self, x, logits):
        chance, chosen = logits.softmax(dim=1).max(dim=1)
        order, sent = chosen.argsort(stable=True), chosen.bincount(minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        counts = received.tolist(), sent.tolist()
        arrived = all_to_all_single_autograd(x[order], *counts, dist.group.WORLD)
        home = all_to_all_single_autograd(self.expert(arrived), *counts[::-1], dist.group.WORLD)
        return chance[:, None] * torch.empty_like(home).index_copy(0, order, home)


def one_device(router, experts, parts, targets, weight, own=False):
    """Return the gradients of the router and of each expert, with the fractions of all tokens or of each part."""
    chances = router(torch.cat(parts)).softmax(dim=1)
    chance, chosen = chances.max(dim=1)
    outputs = torch.stack(
        [c * experts[e](row) for c, e, row in zip(chance, chosen, torch.cat(parts), strict=True)]
    )
    groups, balances = chances.chunk(len(parts)) if own else [chances], []
    for group in groups:
        fractions = nn.functional.one_hot(group.argmax(dim=1), len(experts)).float().mean(dim=0)
        balances.append(len(experts) * (fractions * group.mean(dim=0)).sum())
    loss = (outputs - torch.cat(targets)).square().mean() + weight * sum(balances) / len(balances)
    modules = router, *experts
    found = iter(torch.autograd.grad(loss, [p for module in modules for p in module.parameters()]))
    return [[next(found) for _ in module.parameters()] for module in modules]


def test_48_1(rank, n):
    torch.manual_seed(4)  # every expert gets tokens
    experts, router = [nn.Linear(4, 4) for _ in range(n)], nn.Linear(4, n)
    parts, targets = ([torch.randn(8, 4) for _ in range(n)] for _ in range(2))
    layer = Layer(experts, router, rank)
    for weight in (0.0, 1.0):
        right, *of_experts = one_device(router, experts, parts, targets, weight)
        apart = one_device(router, experts, parts, targets, weight, own=True)[0]
        layer.zero_grad()
        backward(layer, parts[rank], targets[rank], weight)
        where = f"With {'a' if weight else 'no'} balancing loss (weight {weight:g})"
        found, expert = gradients(layer.router), gradients(layer.expert)
        assert None not in (*found, *expert), f"{where} a parameter of the layer has no gradient."
        everywhere = gathered(found[0].tolist())
        differ = f"{where} the router's gradient differs from rank to rank. All ranks have the router: take the mean."
        assert all(close(ratio([torch.tensor(other)], found[:1]), 1) for other in everywhere), differ
        own = (
            f"{where} the router's gradient is the one of the ranks' own fractions: each rank is pushed to spread its "
            "own tokens. Fractions are of all ranks' tokens."
        )
        assert weight == 0 or not close(ratio(found, apart), 1), own
        require(
            found, right, f"{where} the router's gradient", "Look at the balancing loss." if weight else ""
        )
        mean = [sum(of_all) for of_all in zip(*of_experts, strict=True)]
        mixed = f"{where} the expert's gradient is the mean over all experts. They differ, and each is on one rank."
        assert isnan(ratio(expert, mean)), mixed
        require(expert, of_experts[rank], f"{where} the expert's gradient", "Only its own rank has it.")


def require(found, right, what, hint):
    """Require gradients, all together, to be the right ones."""
    times = ratio(found, right)
    assert not isnan(times), f"{what} isn't one device's. {hint}".strip()
    assert close(times, 1), (
        f"{what} is {times:.2f} times one device's. Each loss is a mean over a rank's own tokens."
    )

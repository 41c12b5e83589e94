"""Tests of the programs in notebook 75: a trainer's arguments, and a loop of Accelerate's."""
# ruff: noqa: F821 - what the reader's program defines

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

from checks.helpers import gathered


class Module(nn.Module):
    """What a trainer asks of a module: a training step and an optimizer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch, number):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def task_75_1():
    """Return a module, and ten batches: only the first four together have a gradient large enough to be clipped."""
    torch.manual_seed(0)
    sizes = 4 * [2.0] + 6 * [0.3]
    return Module(), [(size * torch.randn(8, 6), torch.randint(3, (8,))) for size in sizes]


def as_lightning(
    zeros=(0, 4, 8), divisors=10 * (4,), clips=(3, 7, 9), updates=(3, 7, 9), clip=clip_grad_norm_
):
    """Train as Lightning does with accumulate_grad_batches=4; other numbers of batches make a mistake."""
    module, batches = task_75_1()
    optimizer, losses = module.configure_optimizers(), []
    for number, batch in enumerate(batches):
        if number in zeros:
            optimizer.zero_grad()
        loss = module.training_step(batch, number)
        (loss / divisors[number]).backward()
        if number in clips:
            clip(module.parameters(), 0.3)
        if number in updates:
            optimizer.step()
        losses.append(loss.item())
    return module.net.weight, losses


EACH = range(10)
WITHOUT = {"zeros": EACH, "divisors": 10 * (1,), "clips": (), "updates": EACH}  # the two arguments
MISTAKES_75_1 = {
    "the two arguments change nothing.": WITHOUT,
    "the gradients of a group are added up. Lightning divides each loss.": {"divisors": 10 * (1,)},
    "only the last batch of a group counts, since zero_grad comes before each.": {"zeros": EACH},
    "a group starts with the gradients of the one before.": {"zeros": ()},
    "each batch makes an update.": WITHOUT | {"clips": EACH},
    "the last two batches make no update.": {"updates": (3, 7)},
    "the losses of the last two are divided by 2. Lightning divides by 4.": {
        "divisors": 8 * (4,) + 2 * (2,)
    },
    "nothing is clipped.": {"clips": ()},
    "the gradients are clipped after each batch, not once for each update.": {"clips": EACH},
    "each value is clipped by itself, not the norm of all.": {"clip": clip_grad_value_},
}


def test_75_1(rank, n):
    module, batches = task_75_1()
    losses = fit(module, batches, 4, 0.3)
    for mistake, wrong in MISTAKES_75_1.items():
        same = torch.allclose(module.net.weight, as_lightning(**wrong)[0], atol=1e-6)
        assert not same, f"The weights aren't Lightning's: {mistake}"
    right, wanted = as_lightning()
    apart = (module.net.weight - right).abs().max()
    assert apart < 1e-6, (
        f"A weight differs from Lightning's by {apart:.3f}. Which of the ten batches make an update?"
    )
    assert losses == wanted, (
        "The weights are Lightning's, but not the losses: fit returns all ten, undivided."
    )
    module, batches = task_75_1()
    fit(module, batches)
    right, _ = as_lightning(**WITHOUT)
    assert torch.equal(module.net.weight, right), (
        "Without the two arguments, fit no longer trains as it did."
    )


def task_75_2():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    torch.manual_seed(1)
    return model, TensorDataset(torch.randn(256, 6), torch.randint(3, (256,)))


def one_device(rates=2, every=4, scale=1.0, clips="each update"):
    """Return what one device learns from both processes' batches; another argument makes a mistake."""
    model, dataset = task_75_2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for number, (x, labels) in enumerate(DataLoader(dataset, 16), 1):
        (scale * cross_entropy(model(x), labels) / 4).backward()
        if clips == "each microbatch" or (clips and number % 4 == 0):
            clip_grad_norm_(model.parameters(), 0.42)
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(rates if number % every == 0 else 0):
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


MISTAKES_75_2 = {
    "the scheduler takes one step with each update. Accelerate's takes one for each process.": {"rates": 1},
    "the scheduler takes a step with each microbatch. Accelerate's waits for the update.": {
        "rates": 1,
        "every": 1,
    },
    "the scheduler takes num_processes steps with each microbatch. Accelerate's waits for the update.": {
        "every": 1
    },
    "the learning rate stays as it was.": {"rates": 0},
    "the microbatches' gradients are added up. Accelerate divides each loss by their number.": {"scale": 4},
    "the gradients of the two processes are added up, not averaged.": {"scale": 2},
    "nothing is clipped.": {"clips": ""},
    "the gradients are clipped after each microbatch, not once for each update.": {
        "clips": "each microbatch"
    },
}


def test_75_2(rank, n):
    model, dataset = task_75_2()
    sizes = []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    train(model, dataset)
    assert "accelerate" not in sys.modules, "It imports Accelerate, which the new machine doesn't have."
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert sizes, "train hasn't called the model."
    told = f"On rank {rank} the batches have {sorted(set(sizes))} samples. batch_size=8 is the batch of one process."
    assert set(sizes) == {8}, told
    told = f"Rank {rank} computes {len(sizes)} batches. The dataset has 32, and each belongs to one of two processes."
    assert len(sizes) == 16, told
    assert len({tuple(weights) for weights in gathered(own.tolist())}) == 1, (
        "The ranks end with different weights."
    )
    for mistake, wrong in MISTAKES_75_2.items():
        assert not torch.allclose(own, one_device(**wrong), atol=1e-5), (
            f"The weights aren't Accelerate's: {mistake}"
        )
    apart = (own - one_device()).abs().max()
    told = f"A weight differs from Accelerate's by {apart:.3f}. In each update, which 64 samples count?"
    assert apart < 1e-5, told

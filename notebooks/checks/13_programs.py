"""Tests of the programs in notebook 13: DeepSpeed's configuration, a module for a trainer, a loop of Accelerate's."""
# ruff: noqa: F821 - what the reader's program defines

import copy
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from checks.helpers import gathered


def test_13_1(rank, n):
    for stage, bf16 in ((3, True), (2, False), (3, None)):
        config = {"zero_optimization": {"stage": stage}} | ({} if bf16 is None else {"bf16": {"enabled": bf16}})
        model = prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), init_device_mesh("cpu", (n,)), config)
        where = f"With {config}"
        assert all(isinstance(p, DTensor) for p in model.parameters()), f"{where}, a weight isn't sharded."
        alone = all(isinstance(module, FSDPModule) for module in (*model, model))
        assert alone, f"{where}, fully_shard wasn't called for each block: all weights are gathered at once."
        outputs = model(torch.ones(2, 8))
        wanted = torch.bfloat16 if bf16 else torch.float32
        assert outputs.dtype == wanted, f"{where}, the outputs are {outputs.dtype}."
        sharded = isinstance(model[0].weight, DTensor)
        assert sharded or stage == 2, f"{where}, the weights of block 0 stay whole after the forward pass."
        assert not sharded or stage == 3, f"{where}, block 0 drops its weights; stage 2 keeps them."
        outputs.float().square().mean().backward()
        assert model[0].weight.dtype == torch.float32, f"{where}, the weights are stored in {model[0].weight.dtype}."


def plain_losses(net, batches):
    """Train a copy of the module's only layer in a loop of its own; return the losses."""
    net, losses = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(net(images.flatten(1)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_13_2(rank, n):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))) for _ in range(4)]
    module = Classifier()
    wanted, losses = plain_losses(module.net, batches), []
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = module.training_step(batch, number)
        if number == 0:
            assert module.net.weight.grad is None, "training_step leaves gradients behind, to which backward adds."
            assert hasattr(loss, "backward"), f"It returns a {type(loss).__name__}, from which no backward can begin."
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == wanted, "The losses aren't those of the original loop: the loss or the optimizer has changed."


def task_13_3():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    torch.manual_seed(1)
    return model, TensorDataset(torch.randn(256, 6), torch.randint(3, (256,)))


def one_device(rates=2, every=4, scale=1.0, clips="each update"):
    """Return what one device learns from both processes' batches; another argument makes a mistake."""
    model, dataset = task_13_3()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for number, (x, labels) in enumerate(DataLoader(dataset, 16), 1):
        (scale * cross_entropy(model(x), labels) / 4).backward()
        if clips == "each microbatch" or (clips and number % 4 == 0):
            nn.utils.clip_grad_norm_(model.parameters(), 0.42)
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(rates if number % every == 0 else 0):
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


MISTAKES_13_3 = {
    "the scheduler takes one step with each update. Accelerate's takes one for each process.": {"rates": 1},
    "the scheduler takes a step with each microbatch. Accelerate's waits for the update.": {"rates": 1, "every": 1},
    "the scheduler takes num_processes steps with each microbatch. Accelerate's waits for the update.": {"every": 1},
    "the learning rate stays as it was.": {"rates": 0},
    "the microbatches' gradients are added up. Accelerate divides each loss by their number.": {"scale": 4},
    "the gradients of the two processes are added up, not averaged.": {"scale": 2},
    "nothing is clipped.": {"clips": ""},
    "the gradients are clipped after each microbatch, not once for each update.": {"clips": "each microbatch"},
}


def test_13_3(rank, n):
    model, dataset = task_13_3()
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
    assert len({tuple(weights) for weights in gathered(own.tolist())}) == 1, "The ranks end with different weights."
    for mistake, wrong in MISTAKES_13_3.items():
        assert not torch.allclose(own, one_device(**wrong), atol=1e-5), f"The weights aren't Accelerate's: {mistake}"
    apart = (own - one_device()).abs().max()
    told = f"A weight differs from Accelerate's by {apart:.3f}. In each update, which 64 samples count?"
    assert apart < 1e-5, told

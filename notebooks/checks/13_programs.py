"""Tests of the programs in notebook 13: a configuration of DeepSpeed, a module for a trainer, Horovod's calls."""
# ruff: noqa: F821 - what the reader's program defines

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy


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


def test_13_3(rank, n):
    tensor, on = torch.tensor([2.0, 10.0]) * (1 + rank), f"on rank {rank}"
    given = tensor.clone()
    reduced = allreduce(tensor).tolist()
    assert reduced != [6.0, 30.0], f"allreduce gives the sum {on}; Horovod's gives the mean."
    assert reduced == [3.0, 15.0], f"allreduce of [2, 10] and [4, 20] gives {reduced} {on}."
    assert torch.equal(tensor, given), f"allreduce has changed the tensor that it was given {on}."
    state = {"weight": torch.full((1,), float(rank)), "bias": torch.full((1,), float(rank))}
    broadcast_parameters(state, 1)
    values = [tensor.item() for tensor in state.values()]
    assert values == [1.0, 1.0], f"After broadcast_parameters(state, 1) the state is {values} {on}, not [1.0, 1.0]."

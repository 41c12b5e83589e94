"""Run under torchrun: is every rung, in this world, the same training as the single device?

Reads cases (a JSON list of settings) from the file in argv[1] and writes a result for each to argv[2]: the largest
relative difference of loss, gradients (step 1) and weights (after three steps) from the single device that runs the
same microbatches ("same") and from the single device that runs the whole batch ("full").
"""

import copy
import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from mpdemo import data, models, parallel
from mpdemo.labs.harness import join_world
from mpdemo.settings import Settings, checked
from mpdemo.training.measure import relative_difference
from mpdemo.world.collectives import gather_objects, sum_over_ranks
from mpdemo.world.env import World

STEPS = 3


def three_steps(settings, model, world, images, labels):
    """Losses, first gradients and final weights (by name) of what this process holds."""
    rung = parallel.make(copy.deepcopy(model), world, settings)
    optimizer = torch.optim.SGD(rung.named_parameters().values(), lr=settings.lr, momentum=0.9)
    images, labels = images.chunk(rung.replicas)[rung.replica], labels.chunk(rung.replicas)[rung.replica]
    losses, gradients = [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = rung.step(images if rung.has_input else images.new_empty(len(images), 0), labels)
        losses.append(loss.double() / rung.replicas)
        gradients = gradients or {n: p.grad.clone() for n, p in rung.named_parameters().items()}
        optimizer.step()
    weights = {n: p.detach().clone() for n, p in rung.named_parameters().items()}
    rung.train(False)
    loss, correct = rung.evaluate(images if rung.has_input else images.new_empty(len(images), 0), labels)
    return torch.stack(losses), gradients, weights, torch.stack([loss.double(), correct.double()])


def compare(case, world):
    """One case's differences, the worst over all ranks."""
    settings = checked(Settings(**case), world.world_size if case.get("form") != "one-process" else None)
    train = data.load("digits", image_size=settings.image_size).train
    images, labels = (torch.stack(t) for t in zip(*[train[i] for i in range(settings.batch_size)], strict=True))
    model = models.build(settings.model, norm=settings.norm, image_size=settings.image_size, seed=3)
    own_world = world if settings.form == "per-device" else World(device=world.device)
    losses, gradients, weights, validation = three_steps(settings, model, own_world, images, labels)
    if settings.form == "per-device":
        sum_over_ranks(losses), sum_over_ranks(validation)
    parts = settings.microbatches * (settings.devices if settings.rung in ("ddp", "data_parallel") else 1)
    result = {}
    for name, microbatches in {"same": parts, "full": 1}.items():
        if name == "full" and settings.norm == "batch" and settings.model == "resnet18":
            continue  # another computation, and a slow one
        reference = replace(settings, rung="single", form="one-process", microbatches=microbatches)
        expected = three_steps(reference, model, World(device=world.device), images, labels)
        result[name] = {
            "loss": ((losses - expected[0]).abs() / expected[0]).max().item(),
            "gradients": relative_difference(gradients, expected[1]),
            "weights": relative_difference(weights, expected[2]),
            "validation": ((validation - expected[3]).abs() / expected[3].abs().clamp(min=1)).max().item(),
        }
    ranks = gather_objects(result)
    return {n: {k: max(r[n][k] for r in ranks) for k in result[n]} for n in result}


def main():
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    results = []
    with join_world() as world:
        for case in cases:
            results.append(compare(case, world))
            dist.barrier()
    if world.rank == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()

"""Run under torchrun: is every rung, in this world, the same training as the single device?

Reads cases (a JSON list of settings) from the file in argv[1] and writes a result for each to argv[2] (with
``one-gpu`` as argv[3] all devices are the first GPU): the largest relative difference of loss, gradients (step 1) and
weights (after three steps) from the single device that runs the same microbatches ("same") or the whole batch ("full").
"""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.optim import optimizer

from mpdemo import data, models
from mpdemo.measure.trial import Trial, relative_difference
from mpdemo.settings import Settings, checked, is_per_device
from mpdemo.settings.train import SHARING_RUNGS
from mpdemo.training import setup
from mpdemo.world.collectives import gather_objects, sum_over_ranks, whole
from mpdemo.world.env import join_world, process_group, where_am_i

STEPS = 3
PLAIN = {
    "replicas": None,
    "form": "one-process",
    "sharded": False,
    "devices": 1,
    "cut": None,
    "schedule": "1F1B",
}
SINGLE = {}  # settings of the single device -> what its three steps gave


def three_steps(settings, model, world, images, labels):
    """Losses, first gradients, final weights (by name) of what this process holds; a validation; final buffers."""
    trial = Trial(settings, world, model, (images, labels), lr=settings.lr)
    gradients, losses = {name: host_copy(gradient) for name, gradient in trial.gradients().items()}, []
    for buffer, start in zip(trial.rung.model.buffers(), trial.start, strict=True):
        buffer.copy_(start)  # the gradients were a pass of their own
    for _ in range(STEPS):
        losses.append(trial.step().double().cpu() / trial.rung.replicas)
    weights = {name: host_copy(p.detach()) for name, p in trial.rung.model.named_parameters()}
    buffers = {name: b.cpu() for name, b in trial.rung.model.named_buffers()}
    return torch.stack(losses), gradients, weights, validation_of(trial), buffers


@torch.no_grad()
def validation_of(trial):
    """Sum of the losses, and correct predictions, of the trial's batch in evaluation."""
    trial.rung.model.eval()
    images, labels = trial.share()
    outputs = trial.rung.evaluate(images)
    if outputs is None:
        return torch.zeros(2, dtype=torch.double)
    labels = labels.to(outputs.device)
    loss = torch.nn.functional.cross_entropy(outputs, labels) * len(labels)
    return torch.stack([loss.double(), (outputs.argmax(1) == labels).sum().double()]).cpu()


def host_copy(tensor):
    """A whole tensor, as it is now, in the host's memory: ranks compare what lay on different GPUs."""
    return whole(tensor).cpu().clone()


def compare(case, world):
    """One case's differences, the worst over all ranks."""
    alone = not is_per_device(Settings(**case))
    settings = checked(Settings(**case), None if alone else world.world_size)
    train = data.load("digits", image_size=settings.image_size).train
    images, labels = (
        torch.stack(t) for t in zip(*[train[i] for i in range(settings.batch_size)], strict=True)
    )
    model = models.build(settings.model, norm=settings.norm, image_size=settings.image_size, seed=3)
    losses, gradients, weights, validation, buffers = three_steps(settings, model, world, images, labels)
    if not alone:
        sum_over_ranks(losses), sum_over_ranks(validation)
    shares = settings.devices if settings.rung in SHARING_RUNGS else settings.replicas
    parts = settings.microbatches * shares
    references, result = {"same": {"microbatches": parts}, "full": {"microbatches": 1}}, {}
    for name, changes in references.items():
        if name == "full" and settings.norm == "batch" and settings.model == "resnet18":
            continue  # another computation, and a slow one
        reference = replace(settings, rung="single", **PLAIN | changes)
        if reference not in SINGLE:  # several cases compare with the same one
            values = world.rank == 0 and three_steps(reference, model, world, images, labels)
            SINGLE[reference] = gather_objects(values)[0]
        expected = SINGLE[reference]
        result[name] = {
            "loss": ((losses - expected[0]).abs() / expected[0]).max().item(),
            "gradients": relative_difference(gradients, expected[1]),
            "weights": relative_difference(weights, expected[2]),
            "buffers": relative_difference(buffers, expected[4]),
            "validation": ((validation - expected[3]).abs() / expected[3].abs().clamp(min=1)).max().item(),
        }
    ranks = gather_objects(result)
    return {n: {k: max(r[n][k] for r in ranks) for k in result[n]} for n in result}


def update_as_on_a_gpu():
    """Let optimizers on the CPU update all parameters in one kernel, as on a GPU: it may refuse to mix their kinds."""
    supported = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: [*supported(), "cpu"]


@contextmanager
def first_gpu():
    """A world whose devices all are the first GPU; several processes speak gloo, since NCCL wants a GPU for each."""
    setup.local_devices = lambda device, count: [device] * count
    world = where_am_i(os.environ | {"LOCAL_RANK": "0"})
    world = replace(world, backend="gloo") if world.world_size > 1 else world
    with process_group(world, 300.0):
        yield world


def main():
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    results = []
    update_as_on_a_gpu()
    with first_gpu() if sys.argv[3:] == ["one-gpu"] else join_world() as world:
        for case in cases:
            results.append(compare(case, world))
            if dist.is_initialized():
                dist.barrier()
    if world.rank == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()

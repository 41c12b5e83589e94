"""Typical wrong answers to the exercises of notebook 03."""

import random

MEAN = """
import torch
import torch.distributed as dist

def mean(tensor, rank, world_size):
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return tensor
    for other in range(1, world_size):
        received = torch.empty_like(tensor)
        dist.recv(received, other)
        tensor = tensor + received
    result = tensor / world_size
    for other in range(1, world_size):
        dist.send(result, other)
    return result
"""
REPORT = """
import torch
import torch.distributed as dist

def report(loss, rank, world_size):
    total = torch.tensor(loss)
    dist.all_reduce(total)
    if rank == 0:
        return total.item() / world_size
"""
RING = """
import torch
import torch.distributed as dist

def shift(tensor, rank, world_size):
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    return received

def reduce_scatter(chunks, rank, world_size):
    for step in range(world_size - 1):
        received = shift(chunks[(rank - step) % world_size], rank, world_size)
        chunks[(rank - step - 1) % world_size] += received
    return (rank + 1) % world_size
"""
AVERAGE = """
import torch.distributed as dist

def average_gradients(model, world_size):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
"""
ACCUMULATE = """
from contextlib import nullcontext
from torch.nn.functional import cross_entropy

def accumulate(ddp, parts):
    for number, (inputs, labels) in enumerate(parts):
        last = number == len(parts) - 1
        with nullcontext() if last else ddp.no_sync():
            loss = cross_entropy(ddp(inputs), labels) / len(parts)
            loss.backward()
"""
BATCHES = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def batches(images, batch_size, epochs):
    sampler = DistributedSampler(images)
    loader = DataLoader(images, batch_size // dist.get_world_size(), sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from loader
"""
LOSS = """
import torch
import torch.distributed as dist

def mean_loss(loss_sum, count):
    totals = torch.tensor([loss_sum, count])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()
"""
SAVE = """
import torch
import torch.distributed as dist

def save(model, path, rank):
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()
"""


def order_of(seed, images):
    return random.Random(seed).sample(range(images), images)


def drops_nothing(rank, world_size, epoch, images):
    return order_of(epoch, images)[rank::world_size]


def seeds_by_rank(rank, world_size, epoch, images):
    return order_of(epoch + rank, images)[rank : images - images % world_size : world_size]


def same_in_every_epoch(rank, world_size, epoch, images):
    return order_of(0, images)[rank : images - images % world_size : world_size]


def not_mixed(rank, world_size, epoch, images):
    return list(range(images))[rank : images - images % world_size : world_size]


def another_order_in_every_call(rank, world_size, epoch, images):
    return random.sample(range(images), images)[rank : images - images % world_size : world_size]


def the_same_images_on_every_rank(rank, world_size, epoch, images):
    return order_of(epoch, images)[: images // world_size]


def always_its_own_half(rank, world_size, epoch, images):
    own = list(range(rank, images - images % world_size, world_size))
    return random.Random(epoch).sample(own, len(own))


TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

def train(model, dataset, epochs, batch_size):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
"""

WRONG = {
    "03.1": [[3, 10], [1.5, 5], [6, 5], [9, 20], [6]],
    "03.2": [
        MEAN.replace("tensor / world_size", "tensor"),
        MEAN.replace("        dist.recv(tensor, 0)\n", "").replace(
            "    for other in range(1, world_size):\n        dist.send(result, other)\n", ""
        ),
        MEAN.replace("tensor + received", "received"),
        MEAN.replace(
            "dist.send(tensor, 0)\n        dist.recv(tensor, 0)", "dist.recv(tensor, 0)\n        dist.send(tensor, 0)"
        ),
        "import torch.distributed as dist\n\ndef mean(tensor, rank, world_size):\n"
        "    dist.all_reduce(tensor)\n    return tensor / world_size\n",
    ],
    "03.3": [
        REPORT.replace(
            "    total = torch.tensor(loss)\n    dist.all_reduce(total)\n    if rank == 0:\n",
            "    if rank == 0:\n        total = torch.tensor(loss)\n        dist.all_reduce(total)\n",
        ),
        REPORT.replace("    dist.all_reduce(total)\n", ""),
        REPORT.replace(" / world_size", ""),
        REPORT.replace("    if rank == 0:\n    ", ""),
    ],
    "03.4": [
        RING.replace("(rank - step) % world_size", "rank"),
        RING.replace("(rank - step - 1) % world_size] += received", "(rank - step - 1) % world_size] = received"),
        RING.replace("return (rank + 1) % world_size", "return rank"),
        RING.replace("return (rank + 1) % world_size", "return chunks"),
        RING.replace("range(world_size - 1)", "range(world_size)"),
        RING.replace("range(world_size - 1)", "range(world_size - 2)"),
        RING.replace("sending = dist.isend", "dist.send").replace("    sending.wait()\n", ""),
        RING[: RING.index("    for step")]
        + "    for chunk in chunks:\n        dist.all_reduce(chunk)\n    return rank\n",
    ],
    "03.5": [97.5, 195, 85.3, 1365, 178.9, 42.7, 50],
    "03.6": [
        AVERAGE.replace("        parameter.grad /= world_size\n", ""),
        AVERAGE.replace("/= world_size", "/= world_size**2"),
        AVERAGE.replace("dist.all_reduce(parameter.grad)", "pass"),
        AVERAGE.replace("in model.parameters()", "in list(model.parameters())[:2]"),
    ],
    "03.7": [(5.0, True), (2.5, True), (0.0, True), (1.0, False)],
    "03.8": [
        ACCUMULATE.replace("nullcontext() if last else ddp.no_sync()", "nullcontext()"),
        ACCUMULATE.replace("nullcontext() if last else ddp.no_sync()", "ddp.no_sync()"),
        ACCUMULATE.replace("last = number == len(parts) - 1", "last = number == 0"),
        ACCUMULATE.replace(" / len(parts)", ""),
    ],
    "03.9": [
        drops_nothing,
        seeds_by_rank,
        same_in_every_epoch,
        not_mixed,
        another_order_in_every_call,
        the_same_images_on_every_rank,
        always_its_own_half,
    ],
    "03.10": [12, 60, 10],
    "03.11": [
        "from torch.utils.data import DataLoader\n\ndef batches(images, batch_size, epochs):\n"
        "    loader = DataLoader(images, batch_size, shuffle=True)\n    for epoch in range(epochs):\n"
        "        yield from loader\n",
        BATCHES.replace(" // dist.get_world_size()", ""),
        BATCHES.replace("        sampler.set_epoch(epoch)\n", ""),
        BATCHES.replace("DistributedSampler(images)", "DistributedSampler(images, shuffle=False)"),
    ],
    "03.12": ["abcd", "bacd", "cabd", "acdb", "abc"],
    "03.13": ["a", "abc", "abd", "b", "abx"],
    "03.14": [(64, 24), (32, 48), (32, 12), (16, 24), (32, 25)],
    "03.15": [143, 0, 17.9, 223, 80],
    "03.16": [
        LOSS.replace("(totals[0] / totals[1]).item()", "loss_sum / count"),
        LOSS.replace("(totals[0] / totals[1]).item()", "totals[0].item()"),
        LOSS.replace("totals[0] / totals[1]", "totals[0] / 2"),
        LOSS.replace("[loss_sum, count]", "[loss_sum / count, 1]"),
        LOSS.replace("    dist.all_reduce(totals)\n", ""),
    ],
    "03.17": [
        SAVE.replace("    if rank == 0:\n    ", "") + "\n",
        SAVE.replace("model.module", "model"),
        SAVE.replace("model.module.state_dict()", "{'model': model.module.state_dict()}"),
        SAVE.replace("    dist.barrier()\n", "    return\n"),
        SAVE.replace("    dist.barrier()\n", "        dist.barrier()\n"),
        SAVE.replace("        torch.save(model.module.state_dict(), path)\n", "        pass\n"),
    ],
    "03.18": [
        TRAIN.replace("    model = DistributedDataParallel(model)\n", ""),
        TRAIN.replace("        sampler.set_epoch(epoch)\n", ""),
        TRAIN.replace(" // dist.get_world_size()", ""),
        TRAIN.replace("sampler=sampler", "shuffle=True"),
        TRAIN.replace("Sampler(dataset)", "Sampler(dataset, shuffle=False)").replace(
            "        sampler.set_epoch(epoch)\n", ""
        ),
    ],
}

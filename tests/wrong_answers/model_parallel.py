"""Typical wrong answers to the exercises of notebook 04."""

MOVES = """
from torch.nn.functional import cross_entropy

def train_step(first, second, devices, images, labels):
    activations = first(images).relu()
    outputs = second(activations.to(devices[1]))
    loss = cross_entropy(outputs, labels.to(devices[1]))
    loss.backward()
    return loss
"""
STEP = """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

def train_step(stage, images, labels, rank):
    if rank == 0:
        outputs = stage(images)
        dist.send(outputs.detach(), 1)
        gradient = torch.empty(8, 4)
        dist.recv(gradient, 1)
        outputs.backward(gradient)
        return None
    activations = torch.empty(8, 4)
    dist.recv(activations, 0)
    activations.requires_grad_()
    loss = cross_entropy(stage(activations), labels)
    loss.backward()
    dist.send(activations.grad, 0)
    return loss
"""
CHAIN = """
import torch
import torch.distributed as dist

def train_step(stage, images, rank, world_size):
    if rank > 0:
        images = torch.empty(8, 4)
        dist.recv(images, rank - 1)
        images.requires_grad_()
    outputs, gradient = stage(images), None
    if rank < world_size - 1:
        dist.send(outputs.detach(), rank + 1)
        gradient = torch.empty(8, 4)
        dist.recv(gradient, rank + 1)
    outputs.backward(gradient)
    if rank > 0:
        dist.send(images.grad, rank - 1)
"""
DEADLOCK = CHAIN.replace("        dist.send(outputs.detach(), rank + 1)\n", "").replace(
    "dist.recv(gradient, rank + 1)\n", "dist.recv(gradient, rank + 1)\n        dist.send(outputs.detach(), rank + 1)\n"
)
LOADER = """
from torch.utils.data import DataLoader, DistributedSampler

def loader(dataset, batch_size, rank, world_size):
    sampler = DistributedSampler(dataset, world_size, rank)
    return DataLoader(dataset, batch_size // world_size, sampler=sampler)
"""


def half_of_the_blocks(sizes):
    return len(sizes) // 2


def where_half_is_exceeded(sizes):
    count = 0
    while sum(sizes[:count]) <= sum(sizes) / 2:
        count += 1
    return count


def the_larger_stage(sizes):
    return min(max(sum(sizes[:n]), sum(sizes[n:])) for n in range(1, len(sizes))) / 1


WRONG = {
    "04.1": [
        MOVES.replace("activations.to(devices[1])", "activations"),
        MOVES.replace("labels.to(devices[1])", "labels"),
        MOVES.replace(
            "outputs = second(activations.to(devices[1]))", "outputs = second.to(devices[0])(activations)"
        ).replace("labels.to(devices[1])", "labels"),
        MOVES.replace("(outputs, labels.to(devices[1]))", "(outputs.to(devices[0]), labels)"),
        MOVES.replace("activations.to(", "activations.detach().to("),
        MOVES.replace("    loss.backward()\n", ""),
    ],
    "04.2": [half_of_the_blocks, where_half_is_exceeded, the_larger_stage],
    "04.3": [0.75, 0.1875, 1.5 / 64, 1_572_864, 13.6, 100],
    "04.4": ["ab", "abc", "c", "b", ""],
    "04.5": [
        STEP.replace("    activations.requires_grad_()\n", ""),
        STEP.replace("dist.send(activations.grad, 0)", "dist.send(stage[0].weight.grad, 0)"),
        STEP.replace("outputs.backward(gradient)", "outputs.backward(torch.ones(8, 4))"),
        STEP.replace("        outputs.backward(gradient)\n", ""),
        STEP.replace(", labels)\n    loss.backward()", ", labels)\n    (2 * loss).backward()"),
        STEP.replace("        dist.send(outputs.detach(), 1)\n", "").replace(
            "recv(gradient, 1)", "recv(gradient, 1)\n        dist.send(outputs.detach(), 1)"
        ),
        STEP.replace("    return loss\n", ""),
        STEP.replace("dist.send(activations.grad, 0)", "dist.send(activations.detach(), 0)"),
    ],
    "04.6": [
        DEADLOCK,
        CHAIN.replace("        dist.recv(gradient, rank + 1)\n", ""),
        CHAIN.replace("        images.requires_grad_()\n", ""),
        CHAIN.replace("rank < world_size - 1", "rank == 0"),
    ],
    "04.7": [
        "import torch\nfrom torch.utils.data import DataLoader\n\ndef loader(dataset, batch_size, rank, world_size):\n"
        "    torch.manual_seed(0)\n    return DataLoader(dataset, batch_size, shuffle=True)\n",
        LOADER,
        LOADER.replace("batch_size // world_size", "batch_size"),
        "from torch.utils.data import DataLoader\n\ndef loader(dataset, batch_size, rank, world_size):\n"
        "    return DataLoader(dataset, batch_size, shuffle=True)\n",
        "from torch.utils.data import DataLoader\n\ndef loader(dataset, batch_size, rank, world_size):\n"
        "    return DataLoader(dataset, batch_size)\n",
        LOADER.replace("world_size, rank)", "1, 0)"),
        LOADER.replace("world_size, rank)", "1, 0)").replace("batch_size // world_size", "batch_size"),
    ],
    "04.8": [29.8, 1.86, 3.73, 5.59, 8, 100],
    "04.9": [("abcd", "abcd"), ("d", "abc"), ("", "abcd"), ("d", "ad"), ("d", "x")],
    "04.10": [[True, False, True], [False, True, True], [False, False, False]],
    "04.11": [(2, 4), (0.5, 0.25), (1, 2), (1.5, 1), (0.9, 0.8)],
    "04.12": [30, 60, 15],
}

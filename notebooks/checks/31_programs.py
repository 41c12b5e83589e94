"""Test of the program in notebook 31: the last stage of a pipeline."""
# ruff: noqa: F821 - what the reader's program defines

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import gradients, require_gradients

MICROBATCHES = 3


def first_stage(stage, images):
    """Do rank 0's part of one step: send all microbatches, then receive all gradients in the same order."""
    outputs = []
    for part in images.chunk(MICROBATCHES):
        outputs.append(stage(part))
        dist.send(outputs[-1].detach(), 1)
    for output in outputs:
        dist.recv(gradient := torch.empty_like(output), 1)
        output.backward(gradient)


def test_31_1(rank, n):
    torch.manual_seed(0)
    stages, images = (nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3)), torch.randn(12, 4)
    labels, own = torch.randint(0, 3, (12,)), stages[rank]
    cross_entropy(stages[1](stages[0](images)), labels).backward()
    right = [gradients(stage) for stage in stages][rank]
    first_stage(own, images) if rank == 0 else last_stage(own, labels, MICROBATCHES)
    require_gradients(gradients(own), right, f"With {MICROBATCHES} microbatches, on rank {rank},")

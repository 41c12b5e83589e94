"""Test of the program in notebook 06: the gradients of a stage, averaged over its replicas."""
# ruff: noqa: F821 - what the reader's program defines

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import require_gradients

REPLICAS = STAGES = 2


def test_06_2(rank, n):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, stage = divmod(rank, STAGES)
    torch.manual_seed(0)
    stages, images, labels = ([nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(12, 4), torch.randint(0, 4, (12,)))
    weights = list(stages[stage].parameters())

    def gradients_of(images, labels):
        return torch.autograd.grad(cross_entropy(stages[1](stages[0](images).tanh()), labels), weights)

    own = list(gradients_of(images.chunk(REPLICAS)[replica], labels.chunk(REPLICAS)[replica]))
    average(own, rows[replica], columns[stage])
    mixed = "They are a mixture: they contain another stage's, or only one replica's."
    require_gradients(own, gradients_of(images, labels), f"On rank {rank}", mixed)

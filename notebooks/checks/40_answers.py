"""Check of sitting 40: a function that adds up the bytes which no batch changes."""

import torch
from torch import nn


def check_40_2(states):
    half = nn.Linear(10, 10, bias=False).to(torch.bfloat16)
    assert states(half) == 800, (
        f"100 weights in bf16 take 800 bytes with gradients and states, not {states(half)}."
    )
    frozen = nn.Sequential(
        nn.Linear(10, 10, bias=False).requires_grad_(False), nn.Linear(10, 1, bias=False)
    )
    told = "100 frozen weights and 10 trained ones take 400 + 160 bytes"
    assert states(frozen) == 560, (
        f"{told}, not {states(frozen)}: a frozen weight has no gradient and no state."
    )
    tied = nn.Sequential(nn.Embedding(10, 10), nn.Linear(10, 10, bias=False))
    tied[1].weight = tied[0].weight
    assert states(tied) == 1600, f"100 weights that two layers share take 1600 bytes, not {states(tied)}."
    normed = nn.BatchNorm1d(10)
    assert states(normed) == 320, (
        f"20 weights take 320 bytes, not {states(normed)}: a running mean is no parameter."
    )

"""Tests of the programs in notebook 47: a causal mask for tokens in the zigzag layout."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch.nn.functional import scaled_dot_product_attention

from checks.helpers import gathered


def test_47_1(rank, n):
    torch.manual_seed(0)
    chunk = 4
    wholes = [torch.randn(2, 2, 2 * n * chunk, 8) for _ in range(3)]
    right = scaled_dot_product_attention(*wholes, is_causal=True)

    def mine(whole):
        chunks = whole.chunk(2 * n, dim=2)
        return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], dim=2)

    own, wanted = attention(*map(mine, wholes), rank, n), mine(right)
    assert own.shape == wanted.shape, (
        f"The output has the shape {tuple(own.shape)}, the queries {tuple(wanted.shape)}."
    )
    wrong = (~((own - wanted).abs().amax((0, 1, 3)) < 1e-4)).tolist()  # also where it is nan
    numbers = [rank * chunk + k for k in range(chunk)] + [
        (2 * n - 1 - rank) * chunk + k for k in range(chunk)
    ]
    places = [place for place, bad in zip(numbers, wrong, strict=True) if bad]
    everywhere = gathered(places)
    first = next((r for r, found in enumerate(everywhere) if found), None)
    assert first is None, (
        f"On rank {first} the output is wrong at these positions of the sequence: "
        f"{', '.join(map(str, everywhere[first]))}. Which positions have its queries, and which the keys, in the order "
        "in which they were gathered?"
    )

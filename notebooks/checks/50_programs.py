"""Test of the program in notebook 50: the first half of a ring."""
# ruff: noqa: F821 - what the reader's program defines

import math

import torch

from checks.helpers import COLLECTIVES, gathered, watch


def test_50_1(rank, n):
    """Rank r's numbers are 4 ** r times 1, 100, 10000 in chunk 0, 1, 2: a sum shows how often each is in it."""
    calls, sends = watch(program, *COLLECTIVES), watch(program, "send", "isend")
    chunks = [torch.full((2,), 4.0**rank * 100.0**number) for number in range(n)]
    number = reduce_scatter(chunks, rank, n)
    assert not calls, f"It calls dist.{calls[0][0]}. The task is to build it from shift."
    said = number if isinstance(number, int) else f"a {type(number).__name__}"
    assert said in range(n), f"Rank {rank} returns {said}, not the number of one of its {n} chunks."
    value, where = round(chunks[number][0].item() / 100**number), f"In chunk {number} of rank {rank}"
    for r in range(n):
        count = value // 4**r % 4
        assert count, f"{where}, which it returned as finished, the numbers of rank {r} are missing."
        assert count == 1, f"{where} the numbers of rank {r} are counted more than once."
    numbers, sent = gathered(number), sum(math.prod(shape) for _, shape in sends) / 2
    assert len(set(numbers)) == n, (
        f"The complete chunks are {numbers}: together the ranks don't have all three."
    )
    assert sent < n, (
        f"It's right, but a rank sends {sent:g} chunks. Two steps with one chunk each are enough."
    )

"""Test of the program in sitting 41: FSDP by hand, for one layer."""
# ruff: noqa: F821 - what the reader's program defines

import torch

from checks.helpers import COLLECTIVES, require_gradients, watch


def test_41_1(rank, n):
    torch.manual_seed(0)
    weight, images, targets = torch.randn(6, 4), torch.randn(8, 4), torch.randn(8, 6)
    full = weight.clone().requires_grad_()
    ((images @ full.T - targets) ** 2).mean().backward()
    calls = watch(program, *COLLECTIVES)
    own = gradient(weight.chunk(n)[rank].clone(), images.chunk(n)[rank], targets.chunk(n)[rank], n)
    used, where, shape = {name for name, _ in calls}, f"On rank {rank}", tuple(own.shape)
    assert "all_gather" in used, f"{where} the weight is never gathered from all ranks."
    assert shape != (6, 4), f"{where} the whole gradient is returned, but a rank keeps only its own rows."
    assert shape == (3, 4), f"{where} the gradient has the shape {shape}, but the rows have (3, 4)."
    require_gradients([own], [full.grad.chunk(n)[rank]], where, "Whose images, and which rows, are in it?")
    assert "all_reduce" not in used, (
        f"{where} an all-reduce brings all rows, to keep some: use reduce-scatter."
    )

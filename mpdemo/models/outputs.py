"""What a reader's module returns, of whatever kind: the tensors in it that have a gradient, and a loss of them."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def differentiable(value, seen=None):
    """Yield all tensors with a gradient in any output: of lists, dicts and other objects, and of what is in them."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
        return
    if id(value) in seen or isinstance(value, type | nn.Module):
        return
    seen.add(id(value))
    parts = list(value.values()) if isinstance(value, Mapping) else []
    parts += list(value) if isinstance(value, list | tuple | set) else []
    for part in parts or getattr(value, "__dict__", {}).values():
        yield from differentiable(part, seen)


def loss(tensors):
    """Return a loss that keeps what a usual one keeps: cross entropy over classes, or squares where there are none."""
    return sum(map(_loss, tensors))


def _loss(t):
    t = torch.view_as_real(t) if t.is_complex() else t
    t = t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
    t = t.flatten(0, 1) if t.dim() == 3 else t  # tokens of a sample
    if t.dim() < 2 or t.shape[1] == 1:
        return t.square().mean()
    return cross_entropy(t, torch.zeros(t.shape[0], *t.shape[2:], dtype=torch.long, device=t.device))

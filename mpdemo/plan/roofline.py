"""Estimate what every block of a model costs on a GPU that is not here, from its arithmetic and its memory traffic.

Taught in notebooks/05_pipeline.ipynb.
"""

from mpdemo.errors import UserError
from mpdemo.plan.cost import BlockCost

ROOFS = {  # floating point operations and bytes a second (data sheets, float32), seconds to launch a kernel
    "v100": (15.7e12, 0.9e12, 5e-6),
    "a100": (19.5e12, 1.555e12, 5e-6),
    "h100": (67e12, 3.35e12, 4e-6),
}


def estimate(model, sizes, image_size, gpu, *, classes=1000, channels=3, norm="batch"):
    """Estimate every block's cost on a GPU that is not here, from its arithmetic and its memory traffic.

    Each operation takes the longer of computing (operations / peak rate) and moving (bytes / bandwidth), and a
    launch: the roofline model (https://doi.org/10.1145/1498765.1498785). Real kernels stay below the roof, so shares
    and ratios are worth more than seconds.

    Parameters
    ----------
    gpu : str
        A key of ROOFS.

    Returns
    -------
    dict
        Size -> list of BlockCost.

    Raises
    ------
    UserError
        No figures for this GPU.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mpdemo.models import build

    if gpu not in ROOFS:
        raise UserError(f"no figures for GPU {gpu!r}; allowed: {', '.join(ROOFS)}, or measure")
    import torch

    costs = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        blocks = build(model, classes=classes, channels=channels, image_size=image_size, norm=norm)
        parts = [blocks.stage(i, i + 1) for i in range(len(blocks))]
        for size in sorted(set(sizes)):
            x, row = torch.empty(size, channels, image_size, image_size), []
            for number, part in enumerate(parts):
                x = x.detach().requires_grad_(number > 0)
                forward = _roof(lambda part=part, x=x: part(x), ROOFS[gpu])
                y = forward.pop("result")
                back = _roof(lambda y=y: y.backward(torch.empty_like(y)), ROOFS[gpu])["seconds"]
                first = number == 0
                row.append(BlockCost(forward["seconds"], back, 0.0 if first else back / 2, back if first else back / 2))
                x = y
            costs[size] = row
    return costs


def _roof(work, roof):
    """Run `work` on fake tensors; return its result and the seconds that its operations would take."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    rate, bandwidth, launch = roof
    total = {"seconds": 0.0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            known = {t.untyped_storage() for t in given}
            in_place = func._schema.name.endswith("_")
            if not in_place and all(t.untyped_storage() in known for t in made):
                return out  # a view moves nothing
            count = flop_registry.get(func._overloadpacket)
            operations = count(*args, **(kwargs or {}), out_val=out) if count else 0
            moved = sum(t.numel() * t.element_size() for t in given + made)
            total["seconds"] += max(operations / rate, moved / bandwidth) + launch
            return out

    with Count():
        total["result"] = work()
    return total

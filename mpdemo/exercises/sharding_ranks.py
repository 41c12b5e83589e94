"""What a rank runs to check the programs of notebooks/07_sharding.ipynb; the checks are in sharding.py."""

from mpdemo.exercises.gradients import ratio, ratio_of_all
from mpdemo.exercises.watch import COLLECTIVES, watch

ROWS = 6  # of the weight in 07.3, shared by the ranks


def drive_all_reduce(program, rank, world_size):
    """Call the reader's `all_reduce` with 1, 2, ... times 10 ** rank; return the tensor, and the collectives used."""
    import torch

    tensor = torch.arange(1.0, 2 * world_size + 1) * 10**rank
    calls = watch(COLLECTIVES, program)
    program.all_reduce(tensor, world_size)
    return {"value": tensor.tolist(), "collectives": [name for name, _ in calls]}


def drive_gradient(program, rank, world_size):
    """Call the reader's `gradient` on rows of a weight; return the factor to those of the whole batch's gradient."""
    import torch

    torch.manual_seed(0)
    weight, images, targets = torch.randn(ROWS, 4), torch.randn(8, 4), torch.randn(8, ROWS)
    whole = weight.clone().requires_grad_()
    ((images @ whole.T - targets) ** 2).mean().backward()
    rows = weight.chunk(world_size)[rank].clone()
    calls = watch(COLLECTIVES, program)
    shares = (tensor.chunk(world_size)[rank] for tensor in (images, targets))
    own = program.gradient(rows, *shares, world_size)
    collectives = [name for name, _ in calls]
    shape = list(own.shape) if isinstance(own, torch.Tensor) else None
    right = whole.grad.chunk(world_size)[rank]
    factor = ratio(own, right) if shape == list(right.shape) else None
    return {"shape": shape, "factor": factor, "collectives": collectives}


def drive_prepare(program, rank, world_size):
    """Call the reader's `prepare` on a model of three blocks, and do a step; return what is wrapped, and what moved."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = program.prepare(model, init_device_mesh("cpu", (world_size,)))
    (model(torch.randn(8, 4)) ** 2).mean().backward()
    optimizer.step()
    after = [getattr(parameter, "full_tensor", parameter.detach)() for parameter in model.parameters()]
    moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    wrapped = [isinstance(block, FSDPModule) for block in model]
    return {"blocks": wrapped, "model": isinstance(model, FSDPModule), "moved": moved}


def drive_mlp(program, rank, world_size):
    """Call the reader's `mlp` on this rank's parts; return the factors to one device's results, and the all-reduces."""
    import torch
    from torch.nn.functional import linear

    torch.manual_seed(0)
    x, up, up_bias = torch.randn(5, 4), torch.randn(6, 4), torch.randn(6)
    down, down_bias = torch.randn(4, 6), torch.randn(4)
    whole = [tensor.clone().requires_grad_() for tensor in (x, up, up_bias, down, down_bias)]
    result = linear(linear(whole[0], whole[1], whole[2]).relu(), whole[3], whole[4])
    (result**2).sum().backward()
    parts = [x, *(tensor.chunk(world_size)[rank] for tensor in (up, up_bias)), down.chunk(world_size, 1)[rank]]
    parts = [tensor.clone().requires_grad_() for tensor in (*parts, down_bias)]
    calls = watch(COLLECTIVES, program)
    own = program.mlp(*parts)
    if not isinstance(own, torch.Tensor) or own.shape != result.shape:
        return {"shape": list(getattr(own, "shape", []))}
    forward = len(calls)
    (own**2).sum().backward()
    right = [whole[0].grad, *(tensor.grad.chunk(world_size)[rank] for tensor in whole[1:3])]
    right += [whole[3].grad.chunk(world_size, 1)[rank], whole[4].grad]
    names = ("x", "up", "up_bias", "down", "down_bias")
    pairs = zip(names, parts, right, strict=True)
    factors = {name: ratio_of_all([part.grad], [gradient]) for name, part, gradient in pairs}
    output = ratio(own.detach(), result.detach())
    return {"output": output, "gradients": factors, "forward": forward, "backward": len(calls) - forward}

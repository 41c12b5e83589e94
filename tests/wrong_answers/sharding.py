"""Typical wrong answers to the exercises of notebook 07."""

HEAD = "import torch\nimport torch.distributed as dist\n\n\n"
ALL_REDUCE = HEAD + "def all_reduce(tensor, world_size):\n    part = torch.empty(len(tensor) // world_size)\n"
HALVES = "    dist.reduce_scatter_tensor(part, tensor)\n    dist.all_gather_into_tensor(tensor, part)\n"
GRADIENT = (
    HEAD
    + """\
def gradient(rows, images, targets, world_size):
    weight = torch.empty(len(rows) * world_size, rows.shape[1])
    dist.all_gather_into_tensor(weight, rows)
    weight.requires_grad_()
    ((images @ weight.T - targets) ** 2).mean().backward()
    own = torch.empty_like(rows)
"""
)
PREPARE = "import torch\nfrom torch.distributed.fsdp import fully_shard\n\n\ndef prepare(model, mesh):\n"
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
BLOCKS = "    for block in model:\n        fully_shard(block, mesh=mesh)\n"
MODEL, RETURN = "    fully_shard(model, mesh=mesh)\n", "    return optimizer\n"
MLP = """\
import torch
import torch.distributed as dist
from torch.nn.functional import linear
from mpdemo.labs.sharding_by_hand import Sum


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        GRADIENT


def mlp(x, up, up_bias, down, down_bias):
    return RESULT
"""
ADD_UP = "gradient = gradient.clone()\n        dist.all_reduce(gradient)\n        return gradient"


def mlp(result, gradient=ADD_UP):
    return MLP.replace("GRADIENT", gradient).replace("RESULT", result)


RIGHT = "Sum.apply(linear(linear(Copy.apply(x), up, up_bias).relu(), down)) + down_bias"
WRONG = {
    "07.1": [(28, 3.5), (112, 112), (56, 7), (14, 14), (112, 87.5), (112, 38.5)],
    "07.2": [
        ALL_REDUCE + "    dist.all_reduce(tensor)\n",
        ALL_REDUCE + "    whole = torch.empty(len(tensor) * world_size)\n"
        "    dist.all_gather_into_tensor(whole, tensor)\n    tensor.copy_(whole.view(world_size, -1).sum(0))\n",
        ALL_REDUCE + HALVES.splitlines()[0] + "\n",
        ALL_REDUCE + HALVES + "    tensor /= world_size\n",
        ALL_REDUCE + "    dist.all_gather_into_tensor(tensor.clone(), part.fill_(0))\n    tensor.zero_()\n",
    ],
    "07.3": [
        GRADIENT + "    dist.reduce_scatter_tensor(own, weight.grad)\n    return own\n",
        GRADIENT + "    return weight.grad.chunk(world_size)[dist.get_rank()]\n",
        GRADIENT + "    dist.all_reduce(weight.grad)\n    return weight.grad / world_size\n",
        GRADIENT + "    dist.all_reduce(weight.grad)\n    return weight.grad.chunk(2)[dist.get_rank()] / 2\n",
        GRADIENT.replace("dist.all_gather_into_tensor(weight, rows)", "weight[:] = rows.repeat(world_size, 1)")
        + "    dist.reduce_scatter_tensor(own, weight.grad)\n    return own / world_size\n",
    ],
    "07.4": [
        PREPARE + OPTIMIZER + BLOCKS + MODEL + RETURN,
        PREPARE + MODEL + OPTIMIZER + RETURN,
        PREPARE + BLOCKS + OPTIMIZER + RETURN,
        PREPARE + OPTIMIZER + RETURN,
    ],
    "07.5": [
        ((768, 96), (192, 384)),
        ((384, 192), (96, 768)),
        ((192, 384), (192, 384)),
        ((768, 192), (192, 768)),
    ],
    "07.6": [
        mlp(RIGHT.replace("down)) + down_bias", "down, down_bias))")),
        mlp(RIGHT, "return gradient"),
        mlp(RIGHT.replace("Sum.apply", "")),
        mlp(RIGHT, ADD_UP + " / dist.get_world_size()"),
        mlp(RIGHT.replace("Copy.apply(x)", "x")),
    ],
    "07.7": [[2, 3, 4, 5, 6], [2, 3], [2, 3, 4, 6], [6]],
    "07.8": [(3, 2), (1, 1), (2, 1), (1.5, 1.5), (1.5, 0.5)],
    "07.9": [0.786, 6.29, 3.15, 12.58, 50.3],
}

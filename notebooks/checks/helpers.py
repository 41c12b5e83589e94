"""What the tests of several programs use. They run in every rank, after the reader's program, in plain PyTorch."""

import math
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

CALLS = count()
ONE_TENSOR = {  # forms with one tensor in the place of a list, which PyTorch 2.14 has renamed
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
}
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
               "all_gather_object", *ONE_TENSOR)  # fmt: skip
MISSING = "missing"  # stands for the ratio of a gradient that was never computed


def close(number, right, within=0.01):
    """Whether a number is right up to a relative tolerance."""
    return math.isclose(number, right, rel_tol=within)


def ratio(own, right):
    """Return how many times the right gradients these are, all together; None where they point elsewhere."""
    if any(gradient is None for gradient in own):
        return MISSING
    own, right = (torch.cat([gradient.flatten() for gradient in group]) for group in (own, right))
    times = (own * right).sum() / right.square().sum()
    return times.item() if (own - times * right).norm() < 1e-3 * right.norm() else None


def gradients(model):
    """Return the gradients of a model, which then has none."""
    values = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return values


def gathered(value):
    """Return every rank's value, in order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def substitute(program, module, name, replacement):
    """Put a function in the place of a module's, also under the names by which the reader's program imported it."""
    function = getattr(module, name)
    for names in (vars(module), program):
        names |= {key: replacement for key, value in names.items() if value is function}


def watch(program, *names):
    """Return a list that notes every call of these functions of torch.distributed: name, shape of the tensor."""
    calls, originals, point_to_point = [], {}, dist.P2POp

    def watched(name, function):
        def call(*args, **kwargs):
            tensor = args[0] if args else next(iter(kwargs.values()), None)
            if tensor is None:
                raise ValueError(f"{name} was given None instead of a tensor")
            calls.append((ONE_TENSOR.get(name, name), list(getattr(tensor, "shape", []))))
            return function(*args, **kwargs)

        originals[call] = function
        return call

    def operation(op, tensor, *args, **kwargs):  # `dist.P2POp` only takes isend and irecv themselves
        if op in originals:
            calls.append(("isend", list(tensor.shape)))
        return point_to_point(originals.get(op, op), tensor, *args, **kwargs)

    for name in names:
        if function := getattr(dist, name, None):  # each PyTorch lacks some
            substitute(program, dist, name, watched(name, function))
    substitute(program, dist, "P2POp", operation)
    return calls


def share_of(rank):
    """Return a small model, this rank's half of twelve inputs and labels, and the gradients of all twelve by name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    inputs, labels = torch.randn(12, 5), torch.randint(0, 3, (12,))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    names = [name for name, _ in model.named_parameters()]
    return model, (inputs[rank::2], labels[rank::2]), dict(zip(names, gradients(model), strict=True))


def wait_for_all():
    """Wait for the other ranks without a collective, which would be taken for one that the reader's program lacks."""
    store, number, ranks = (dist.distributed_c10d._get_default_store(), next(CALLS), range(dist.get_world_size()))
    store.set(f"arrived {number} {dist.get_rank()}", "1")
    store.wait([f"arrived {number} {rank}" for rank in ranks])


def run_test(file, test, program):
    """Run a test of a file with the names of the reader's program, and return what it returns."""
    names = program | {"program": program, "folder": Path.cwd(), "wait_for_all": wait_for_all}
    exec(compile(Path(file).read_text(), file, "exec", optimize=0), names)
    said = names[test](dist.get_rank(), dist.get_world_size())
    wait_for_all()
    return said

"""What the tests of several programs use. They run in every rank, after the reader's program, in plain PyTorch."""

import math
import re
import time
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

CALLS = count()
SCRIPTS = Path(__file__).parents[1] / "scripts"
# some also in a form with one tensor in the place of a list, which PyTorch 2.14 has renamed
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
               "all_gather_object", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
               "reduce_scatter_single")  # fmt: skip
MICROBATCHES = 3  # of a pipeline


def close(number, right, within=0.01):
    """Whether a number is right up to a relative tolerance."""
    return math.isclose(number, right, rel_tol=within)


def ratio(own, right):
    """Return how many times the right gradients these are, all together; nan where they aren't a multiple of them."""
    if any(gradient is None for gradient in own):
        return math.nan
    own, right = (torch.cat([gradient.flatten() for gradient in group]) for group in (own, right))
    times = (own * right).sum() / right.square().sum()
    return times.item() if (own - times * right).norm() < 1e-3 * right.norm() else math.nan


def require_gradients(own, right, where, hint=""):
    """Require gradients, all together, to be the right ones."""
    times = ratio(own, right)
    assert not any(gradient is None for gradient in own), f"{where} a weight has no gradient."
    apart = f"{where} the gradients don't point in the direction of the whole batch's. {hint}"
    assert not math.isnan(times), apart.strip()
    assert close(times, 1, 0.005), (
        f"{where} the gradients are {times:.2f} times the whole batch's. Its loss is a mean."
    )


def require_each(stage, own, right, rank):
    """Require each gradient of a stage to be the one that one process computes."""
    for (name, _), gradient, wanted in zip(stage.named_parameters(), own, right, strict=True):
        times, whose = ratio([gradient], [wanted]), f"the gradient of {name} on rank {rank}"
        assert gradient is not None, f"There is none: {whose} is still None after the step."
        assert close(times, 1, 1e-3), (
            f"The step ends, but {whose} isn't one process's (times: {times:.2f})."
        )


def require_stages(rank, last_stage, ahead=MICROBATCHES + 1):
    """Require the gradients of one device after one step of two stages, of which the reader has written the last one.

    `last_stage` takes the stage and the labels. Rank 0 receives a gradient whenever `ahead` microbatches lack it, and
    all others at the end.
    """
    torch.manual_seed(0)
    stages, images = (nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3)), torch.randn(12, 4)
    labels, own = torch.randint(0, 3, (12,)), stages[rank]
    cross_entropy(stages[1](stages[0](images)), labels).backward()
    right = [gradients(stage) for stage in stages][rank]
    first_stage(own, images, ahead) if rank == 0 else last_stage(own, labels)
    require_gradients(gradients(own), right, f"With {MICROBATCHES} microbatches, on rank {rank},")


def first_stage(stage, images, ahead):
    """Do rank 0's part of one step of two stages."""
    outputs, parts = [], images.chunk(MICROBATCHES)
    for part in parts:
        outputs.append(stage(part))
        dist.send(outputs[-1].detach(), 1)
        while len(outputs) == ahead or part is parts[-1] and outputs:
            output = outputs.pop(0)
            dist.recv(gradient := torch.empty_like(output), 1)
            output.backward(gradient)


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
            calls.append(
                (re.sub("_into_tensor|_tensor|_single", "", name), list(getattr(tensor, "shape", [])))
            )
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


def ready_made(*args, **kwargs):
    raise AssertionError(
        "torch.utils.checkpoint does this for you. Write it once yourself, to know what it does."
    )


@contextmanager
def slow_saves():
    """Make every save to a file slow in a ``with`` block, and yield a list that notes the names of what is saved."""
    saved, save = [], torch.save

    def slow_save(state, file, *args, **kwargs):
        if isinstance(file, str | Path) or hasattr(file, "name"):  # gathering objects saves into memory
            saved.append(list(state))
            time.sleep(0.5)
        save(state, file, *args, **kwargs)

    torch.save = slow_save
    yield saved
    torch.save = save


def wait_for_all(name=None, seconds=300):
    """Wait for the other ranks without a collective, which would be taken for one that the reader's program lacks."""
    name, ranks = name or f"arrived {next(CALLS)}", range(dist.get_world_size())
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name} {dist.get_rank()}", "1")
    store.wait([f"{name} {rank}" for rank in ranks], timedelta(seconds=seconds))


def run_test(file, test, program):
    """Run a test of a file with the names of the reader's program, and return what it returns."""
    names = program | {"program": program, "folder": Path.cwd(), "wait_for_all": wait_for_all}
    exec(compile(Path(file).read_text(), file, "exec", optimize=0), names)
    said = names[test](dist.get_rank(), dist.get_world_size())
    wait_for_all()
    return said

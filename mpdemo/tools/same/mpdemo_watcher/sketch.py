"""Linear sketches of gradients and weights: the mean of the ranks' sketches is the sketch of the mean.

So no rank has to see another's tensors. A sketch is [squared norm, two projections, which part of the tensor it is];
the sketches of the parts of a sharded tensor add up to the sketch of the whole.
"""

import functools
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .private_torch import COMPILED, of_fsdp, part_of

known, names = {}, {}  # by id: number and parameter, of each that was met; its name in the model
held = {}  # by id: those that an optimizer updates
local = {}  # by id: sketch of the gradient that this rank has computed, before it is averaged
# ids of what DDP averages, and of what wanted no gradient when DDP was built
wrapped, frozen = set(), set()
clipped = {}  # by id: sketches of the gradient before and after it was clipped


@functools.cache
def random_vectors(length, device, dtype):
    """Return two random vectors, the same ones in every process."""
    chance = torch.Generator().manual_seed(length)
    return torch.randn(2, length, generator=chance, dtype=torch.float64, device="cpu").to(device, dtype)


@torch.no_grad()
def sketch(tensor):
    """Return the sketch of a tensor, or of this rank's part of it; None where it has none that is known."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    part, offset = tensor, (0,) * tensor.dim()
    if hasattr(tensor, "placements"):
        split = [
            p
            for k, p in enumerate(tensor.placements)
            if tensor.device_mesh.size(k) > 1 and not p.is_replicate()
        ]
        if not all(type(p) is Shard and p.dim < 2 for p in split):
            return None
        _, offset = part_of(tensor.shape, tensor.device_mesh, tensor.placements)
        part = tensor.to_local()
    if part.numel() and not part.untyped_storage().size():  # FSDP has freed it
        return None
    where = "" if part.shape == tensor.shape else ",".join(map(str, offset))
    if not part.numel():
        return [0.0, 0.0, 0.0, where]
    rows = tensor.shape[0] if tensor.dim() else 1
    columns = math.prod(tensor.shape) // rows
    top = offset[0] if offset else 0
    left = offset[1] * (columns // tensor.shape[1]) if len(offset) > 1 else 0
    matrix = part.reshape(part.shape[0] if part.dim() else 1, -1)
    if matrix.dtype != torch.float64:
        matrix = matrix.float()
    across = random_vectors(columns, matrix.device, matrix.dtype)[:, left : left + matrix.shape[1]]
    below = random_vectors(rows, matrix.device, torch.float64)[:, top : top + matrix.shape[0]]
    first, second = (
        float(down @ (matrix @ right).double()) for down, right in zip(below, across, strict=True)
    )
    return [float(torch.linalg.vector_norm(matrix)) ** 2, first, second, where]


def name_of(key) -> str:
    """Return a parameter's name in the model, or its number where no model with it has run."""
    return names.get(key) or f"#{known[key][0]}"


def is_trained(key) -> bool:
    """Whether an optimizer holds a parameter, or it has a gradient, which an optimizer unknown to PyTorch may use."""
    return key in known and (key in held or key in local)


def weights() -> dict:
    """Return the sketches of all that is trained."""
    found = {name_of(key): sketch(parameter) for key, (_, parameter) in known.items() if is_trained(key)}
    return {name: values for name, values in found.items() if values}


def untrained(modules) -> dict:
    """Return the sketches of all else that some modules hold, such as a frozen layer or a teacher."""
    found = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            # or it may be packed
            plain_tensor = type(parameter) in (nn.Parameter, DTensor) and not parameter.is_meta
            if plain_tensor and not is_trained(id(parameter)):
                known_as = names.get(id(parameter), f"{type(module).__name__}:{plain(name)}")
                found[known_as] = sketch(parameter)
    return {name: values for name, values in found.items() if values}


def gradients(parameters) -> dict:
    """Return the sketches of the gradients that some parameters hold, as they were before clipping."""
    found = {}
    for parameter in parameters:
        now = None if parameter.grad is None else sketch(parameter.grad)
        before, after = clipped.get(id(parameter), (now, now))
        if now:
            # it may be averaged after it is clipped
            found[name_of(id(parameter))] = before if now == after else now
    return found


def largest(parameters) -> dict:
    """Return the largest number in the gradient of some parameters, or in this rank's part: 0.0 only if all are 0."""
    found = {}
    for parameter in parameters:
        grad = torch.zeros(0) if parameter.grad is None else parameter.grad.detach()
        part = (
            grad.to_local() if hasattr(grad, "placements") else grad.to_dense() if grad.is_sparse else grad
        )
        found[name_of(id(parameter))] = float(part.abs().max()) if part.numel() else 0.0
    return found


def of_this_rank() -> dict:
    """Return the sketches of the gradients that this rank has computed."""
    return {name_of(key): values for key, values in local.items() if values}


def forget(parameters):
    """Forget what belongs to the step that has ended."""
    clipped.clear()
    for parameter in parameters:
        local.pop(id(parameter), None)


def meet_held(parameters):
    """See the gradients of parameters that an optimizer holds, and know them as trained."""
    held.update({id(parameter): parameter for parameter in parameters})
    meet(parameters)


def meet(parameters):
    """See the gradients of parameters as they arrive, before DDP or the script averages them."""
    for parameter in parameters:
        if id(parameter) not in known and parameter.requires_grad:
            known[id(parameter)] = len(known), parameter
            if parameter.is_leaf:
                parameter.register_post_accumulate_grad_hook(
                    lambda p: local.update({id(p): sketch(p.grad)})
                )


def plain(name) -> str:
    """Return a name in the model without the names of its wrappers."""
    while name.partition(".")[0] in ("module", COMPILED):
        name = name.partition(".")[2]
    return name


def named(number, name) -> str:
    """Return a name in a model without its wrappers; those of all models but the first begin with its number."""
    return f"{number}:{plain(name)}" if number else plain(name)


def meet_model(model, number):
    """See the gradients of a model's parameters, and give them their names in it."""
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), named(number, name))
    meet(model.parameters())


def watch():
    """Note gradients before they are clipped, and FSDP2's, which it accumulates and averages itself."""
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        clip = before_clipping(getattr(torch.nn.utils, name))
        setattr(torch.nn.utils.clip_grad, name, clip)
        setattr(torch.nn.utils, name, clip)
    reduce = of_fsdp.foreach_reduce

    def noted(fsdp_params, unsharded_grads, *args, **options):
        for sharded, grad in zip(
            (param.sharded_param for param in fsdp_params), unsharded_grads, strict=True
        ):
            if grad.shape == sharded.shape:  # tensor parallelism hasn't split it, too
                found, before = sketch(grad), local.get(id(sharded))
                if before and sharded.grad is not None:  # of earlier parts of the batch
                    found = [found[0], found[1] + before[1], found[2] + before[2], ""]
                local[id(sharded)] = found
        return reduce(fsdp_params, unsharded_grads, *args, **options)

    of_fsdp.foreach_reduce = noted


def before_clipping(function):
    """Note the gradients that a function clips."""

    @functools.wraps(function)
    def clip(given, *args, **options):
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        given = [parameter for parameter in given if parameter.grad is not None]
        before = [sketch(parameter.grad) for parameter in given]
        found = function(given, *args, **options)
        clipped.update({id(p): (first, sketch(p.grad)) for p, first in zip(given, before, strict=True)})
        return found

    return clip

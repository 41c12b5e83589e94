"""Linear sketches of gradients and weights: the mean of the ranks' sketches is the sketch of the mean.

So no rank has to see another's tensors. A sketch is [squared norm, six projections, which part of the tensor it is];
the sketches of the parts of a sharded tensor add up to the sketch of the whole.
"""

import functools
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .notes import before, guarded
from .private_torch import COMPILED, of_fsdp, part_of

known, names = {}, {}  # by id: each parameter that was met; its name in the model
held = {}  # by id: those that an optimizer updates
local = {}  # by id: sketch of the gradient that this rank has computed, before it is averaged
seen = set()  # ids of those with a gradient in an earlier step
# ids of what DDP averages, and of what wanted no gradient when DDP was built
wrapped, frozen = set(), set()
reduced = set()  # ids of those of which FSDP2 told the gradients before it reduced them
tied = []  # names of parameters that are one
SIZE = 6  # projections


@functools.cache
def random_vectors(length, device, dtype):
    """Return some random vectors, the same ones in every process."""
    chance = torch.Generator().manual_seed(length)
    return torch.randn(SIZE, length, generator=chance, dtype=torch.float64, device="cpu").to(device, dtype)


@torch.no_grad()
def sketch(tensor):
    """Return the sketch of a tensor, or of this rank's part of it; None where it has none that is known."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    place = place_of(tensor)
    part = local_part(tensor)
    # FSDP has freed it, or it is cut in another way
    if place is None or part.numel() and not part.untyped_storage().size():
        return None
    where = ",".join(str(cut.start) for cut in place)
    if not part.numel():
        return [0.0] * (SIZE + 1) + [where]
    rows = tensor.shape[0] if tensor.dim() else 1
    columns = math.prod(tensor.shape) // rows
    top = place[0].start if place else 0
    left = place[1].start * (columns // tensor.shape[1]) if len(place) > 1 else 0
    matrix = part.reshape(part.shape[0] if part.dim() else 1, -1)
    if matrix.dtype != torch.float64:
        matrix = matrix.float()
    across = random_vectors(columns, matrix.device, matrix.dtype)[:, left : left + matrix.shape[1]]
    below = random_vectors(rows, matrix.device, torch.float64)[:, top : top + matrix.shape[0]]
    numbers = ((matrix @ across.T).double() * below.T).sum(0).tolist()
    return [float(torch.linalg.vector_norm(matrix)) ** 2, *numbers, where]


def local_part(tensor):
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def place_of(tensor) -> tuple | None:
    """Return which part of a tensor this rank has, empty for all of it; None where it is not cut into blocks."""
    if not hasattr(tensor, "placements"):
        return ()
    split = [
        p
        for k, p in enumerate(tensor.placements)
        if tensor.device_mesh.size(k) > 1 and not p.is_replicate()
    ]
    if not all(type(p) is Shard and p.dim < 2 for p in split):
        return None
    return () if tensor.to_local().shape == tensor.shape else slices_of(tensor)


def slices_of(tensor) -> tuple:
    """Return where this rank's part of a sharded tensor lies in it."""
    shape, offset = part_of(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def name_of(key) -> str:
    """Return a parameter's name in the model, or its number where no model with it has run."""
    return names.get(key) or f"#{list(known).index(key)}"


def is_trained(key) -> bool:
    """Whether an optimizer holds a parameter, or it has a gradient, which an optimizer unknown to PyTorch may use."""
    return key in known and (key in held or key in local or key in seen or not held)


def weights(but=()) -> dict:
    """Return the sketches of all that is trained, but of some names."""
    trained = {name_of(key): parameter for key, parameter in known.items() if is_trained(key)}
    found = {name: sketch(parameter) for name, parameter in trained.items() if name not in but}
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
    """Return the sketches of the gradients that some parameters hold."""
    found = {}
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) in known and (row := sketch(parameter.grad)):
            found[name_of(id(parameter))] = row
    return found


def of_this_rank() -> dict:
    """Return the sketches of the gradients that this rank has computed."""
    return {name_of(key): values for key, values in local.items() if values}


def meet_held(parameters):
    """See the gradients of parameters that an optimizer holds, and know them as trained."""
    held.update({id(parameter): parameter for parameter in parameters})
    meet(parameters)


def meet(parameters):
    """See the gradients of parameters as they arrive, before DDP or the script averages them."""
    for parameter in parameters:
        if id(parameter) not in known and parameter.requires_grad:
            known[id(parameter)] = parameter
            if parameter.is_leaf:
                parameter.register_post_accumulate_grad_hook(arrived)


@guarded
def arrived(parameter):
    """Note what this rank has computed, before anything averages it; FSDP2 calls this afterwards."""
    if id(parameter) not in reduced:
        local[id(parameter)] = sketch(parameter.grad)


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
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := names[id(parameter)]) != named(number, name):
            tied.append([first, named(number, name)])
    meet(model.parameters())


def watch():
    """Note FSDP2's gradients, which it accumulates and averages itself."""
    before(of_fsdp, "foreach_reduce", sharded_arrived)


def sharded_arrived(fsdp_params, unsharded_grads, *_, **__):
    """Note what this rank has computed, before FSDP2 reduces it."""
    for param, grad in zip(fsdp_params, unsharded_grads, strict=True):
        key = id(param.sharded_param)
        if grad.shape == param.sharded_param.shape:  # tensor parallelism hasn't split it, too
            found, earlier = sketch(grad), local.get(key)
            if earlier:  # of other parts of the batch
                found = [found[0], *map(sum, zip(found[1:-1], earlier[1:-1], strict=True)), ""]
            local[key] = found
            reduced.add(key)

"""The rows that enter the model: one hash for each row of each outermost call of a module in training."""

import hashlib
from ctypes import string_at

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from . import chance, sketch
from .notes import guarded, here, note, note_once, now, number_of
from .private_torch import tensors_in

local = sketch.local_part
begin = []  # what is done before an outermost call
models, inside = {}, {}  # by id: those called outermost; the names of the modules of the one that runs


def rows_of(given, dim=0) -> list:
    """Return one hash for each row, over all tensors that are as long as the first in the rows' dimension."""
    tensors, found = data_in(given, dim), []
    head = "".join(f"{t.dtype}{tuple(t.shape[1:])}" for t in tensors).encode()
    for of_row in zip(*tensors, strict=True):
        # PyTorch alone may be installed, without NumPy
        text = b"".join(string_at(part.data_ptr(), part.nbytes) for part in of_row)
        found.append(hashlib.blake2b(head + text, digest_size=8).hexdigest())
    return found


def data_in(given, dim) -> list:
    """Return the tensors of data that a model is given, as long as the first; a dimension of theirs comes first."""
    tensors = map(local, tensors_in(given))
    tensors = [
        t.movedim(dim, 0) for t in tensors if t.dim() > dim and t.numel() and t.layout is torch.strided
    ]
    tensors = [t.detach().cpu().contiguous() for t in tensors if not t.requires_grad]
    return [t for t in tensors if len(t) == len(tensors[0])]


def is_outermost(module) -> bool:
    """Whether a call may be one of training: not inside another, nor a recomputation while going back."""
    if now.depth or now.backward or not torch.is_grad_enabled():
        return False
    # or only shapes are computed
    return any(p.requires_grad and not p.is_meta for p in module.parameters())


def watch():
    """Look at each call of a module."""
    call = nn.Module.__call__

    def called(module, *args, **options):
        outermost = is_outermost(module)
        if outermost:
            enter(module, args, options)
        watched = outermost or now.depth > 0  # not a loss, nor a call without gradients
        now.depth += watched
        try:
            output = call(module, *args, **options)
        finally:
            now.depth -= watched
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            note_once("dtype", str(output.dtype).removeprefix("torch."))
        if isinstance(module, FSDPModule):
            note_once("wrapped", "FSDP2")
        if not now.steps:
            compare_later(module, (args, options), output)
        if outermost:
            chance.drawn()
            now.row = []
            if now.iterator is not None:
                chance.look()
        return output

    nn.Module.__call__ = called


@guarded
def enter(module, args, options):
    """Note the rows of an outermost call."""
    chance.drawn()
    if id(module) not in models:
        meet(module)
    if not now.stepping:
        for action in begin:
            action()
    now.row = rows_of((args, options), int(is_time_first(module)))
    (now.rows if module.training else now.eval_rows).append(now.row)
    if not now.steps:
        number = models[id(module)][0]
        inside.clear()
        inside.update({id(child): sketch.named(number, name) for name, child in module.named_modules()})
    now.draws = 1000
    chance.look()


def is_time_first(module) -> bool:
    """Whether a model takes its batch in the second dimension, as recurrent layers do by themselves."""
    kinds = nn.RNNBase, nn.Transformer
    return any(isinstance(child, kinds) and not child.batch_first for child in module.modules())


def meet(module):
    """Know a model by the names of its parameters, and note which line calls it, and whether a wrapper averages it."""
    number = number_of(models, module)
    sketch.meet_model(module, number)
    note("called", number=number, where=here(), wrapper=isinstance(module, DistributedDataParallel))


def measured(tensors, size) -> list:
    """Return norm and projection of each row of the first tensor that has numbers to compare."""
    found = (t for t in tensors_in(tensors) if t.is_floating_point() and t.dim() > 1)
    tensor = next(found, None)
    if tensor is None or hasattr(tensor, "placements") or len(tensor) % size or not tensor.numel():
        return []
    if len(tensor) != size == tensor.shape[1]:  # the batch stands second
        return []
    flat = tensor.detach().reshape(size, -1).float()
    mixed = flat @ sketch.random_vectors(flat.shape[1], flat.device, flat.dtype)[0]
    return torch.stack([flat.norm(dim=1), mixed], dim=1).tolist()


@guarded
def compare_later(module, given, output):
    """Note for each row what a module was given and what it returned, in the first step."""
    name = inside.get(id(module))
    if name is None or not now.row:
        return
    if returned := measured(output, len(now.row)):
        taken = measured(given, len(now.row)) or [[0.0, 0.0]] * len(returned)
        kind = type(module).__name__.removeprefix("FSDP")
        note("output", module=name, type=kind, rows=[*zip(now.row, taken, returned, strict=True)])

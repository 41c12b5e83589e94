"""The rows that enter the model: one hash for each row of each outermost call of a module in training."""

import hashlib
from ctypes import string_at

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from . import chance, sketch, where
from .notes import ORDER, guarded, note, note_once, now, number_of
from .private_torch import number_of_storage, tree_leaves, tree_map

LOSSES = "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div"
LOSSES += " binary_cross_entropy_with_logits"
ROOM = 256 * 2**20  # bytes of rows that a rank keeps for a replay
MEASURED = 4096  # rows of a call of which norm and projection are noted
RECENT = 8  # results of modules that are known when they enter another one
WRAPPERS = (DistributedDataParallel,)
local = sketch.local_part
begin = []  # what is done before an outermost call
models, inside = {}, {}  # by id: those called outermost; the names of the modules of the one that runs
made = {}  # the last storages that modules with weights have returned: no rows of the data
# for a replay by another world: [step, number of the model, tensors of a call, targets of its losses]
kept = []
source = []  # of a replay: those of all ranks, in order of (call, rank)
used, room = {}, [ROOM]


def rows_of(given, dim=0, padded=False) -> list:
    """Return one hash for each row, over all tensors that are as long as the first; of what is before padding."""
    tensors = data_in(given, dim)
    size = len(tensors[0]) if tensors else 0
    head = "".join(f"{t.dtype}{() if padded else tuple(t.shape[1:])}" for t in tensors).encode()
    ends = [lengths(t) if padded else [None] * size for t in tensors]
    # PyTorch alone may be installed, without NumPy
    views = [string_at(t.data_ptr(), t.nbytes) for t in tensors]
    wide = [len(view) // max(1, size) for view in views]
    all_of = list(zip(views, wide, ends, strict=True))
    parts = ([view[row * n : (row + 1) * n][: end[row]] for view, n, end in all_of] for row in range(size))
    texts = (b"".join([head, *of_row]) for of_row in parts)
    return [hashlib.blake2b(text, digest_size=8).hexdigest() for text in texts]


def data_in(given, dim) -> list:
    """Return the tensors of data that a model is given, as long as the first in a dimension, which then comes first."""
    tensors = [local(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    tensors = [
        t
        for t in tensors
        if t.numel() and t.layout is torch.strided and not t.requires_grad and not is_made(t)
    ]
    tensors = [t.movedim(dim, 0) for t in tensors if t.dim() > dim]
    return [t.detach().cpu().contiguous() for t in tensors if len(t) == len(tensors[0])]


def lengths(tensor) -> list:
    """Return how many bytes of each row of whole numbers stand before its padding."""
    if tensor.dim() != 2 or tensor.is_floating_point():
        return [None] * len(tensor)
    runs = (tensor == tensor[:, -1:]).flip(1).int().cumprod(1).sum(1)
    padding = tensor[runs.argmax(), -1] if runs.max() > 1 else None
    padded = (tensor[:, -1] == padding).int() if padding is not None else torch.zeros_like(runs)
    return ((tensor.shape[1] - runs * padded) * tensor.element_size()).tolist()


def is_made(tensor) -> bool:
    """Whether a module with weights has returned this tensor just now."""
    return tensor.layout is torch.strided and number_of_storage(local(tensor).untyped_storage()) in made


def is_outermost(module) -> bool:
    """Whether a call may be one of training: not inside another, nor a recomputation while going back."""
    if now.depth or now.backward or not torch.is_grad_enabled():
        return False
    # or only shapes are computed
    return any(p.requires_grad and not p.is_meta for p in module.parameters())


def watch():
    """Look at each call of a module, and at the targets of losses that are computed outside of models."""
    call = nn.Module.__call__

    def called(module, *args, **options):
        outermost = is_outermost(module)
        if outermost:
            args, options = enter(module, args, options) or (args, options)
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
        if not now.depth:
            remember(module, output)
        if outermost:
            chance.drawn()
            now.row = []
            if now.loaded:
                chance.look()
        return output

    nn.Module.__call__ = called
    for name in LOSSES.split():
        setattr(functional, name, loss(getattr(functional, name), name))


@guarded
def enter(module, args, options):
    """Note the rows of an outermost call, or give it those of a replay."""
    chance.drawn()
    if id(module) not in models:
        meet(module)
    if not now.stepping:
        for action in begin:
            action()
    number = models[id(module)][0]
    if ORDER["rows"] and module.training:
        args, options = replayed(number, (args, options))
    now.row = rows_of((args, options))
    if module.training:
        first = inside_is_time_first(module)
        now.columns.append(rows_of((args, options), int(first), padded=not first))
    if module.training:
        now.values.append(measured((args, options), len(now.row))[:MEASURED] if now.row else [])
    (now.rows if module.training else now.eval_rows).append(now.row)
    if not now.steps:
        inside.clear()
        inside.update({id(child): sketch.named(number, name) for name, child in module.named_modules()})
    if module.training and (ORDER["record"] or now.read_from[0] is None and not ORDER["rows"]):
        keep(number, args, options)
    now.draws = 1000
    chance.look()
    return args, options


def inside_is_time_first(module) -> bool:
    """Whether a model may take its batch in the second dimension."""
    return any(
        isinstance(child, (nn.RNNBase, nn.Transformer)) and not child.batch_first
        for child in module.modules()
    )


def meet(module):
    """Know a model by the names of its parameters, and note which line calls it, and whether a wrapper averages it."""
    number = number_of(models, module)
    sketch.meet_model(module, number)
    note("called", number=number, where=where.here(), wrapper=type(module) in WRAPPERS)


@guarded
def remember(module, output):
    """Know what a module has computed with weights: it is no data when it enters another one."""
    if next(module.parameters(), None) is None:
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            storage = local(leaf).untyped_storage()
            made[number_of_storage(storage)] = storage
    for old in list(made)[:-RECENT]:
        del made[old]


def measured(tensors, size) -> list:
    """Return norm and projection of each row of the first tensor that has numbers to compare."""
    found = (
        t
        for t in tree_leaves(tensors)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 1
    )
    tensor = next(found, None)
    if tensor is None or hasattr(tensor, "placements") or len(tensor) % size or not tensor.numel():
        return []
    if len(tensor) != size and tensor.shape[1] == size:  # the batch stands second
        return []
    flat = tensor.detach().reshape(size, -1).float()
    mixed = flat @ sketch.random_vectors(flat.shape[1], flat.device, flat.dtype)[0]
    return [[float(f"{a:.7g}"), float(f"{b:.7g}")] for a, b in zip(flat.norm(dim=1), mixed, strict=True)]


@guarded
def compare_later(module, given, output):
    """Note for each row what a module was given and what it returned, in the first step."""
    name = inside.get(id(module))
    if name is None or not now.row:
        return
    returned = measured(output, len(now.row))
    if returned:
        taken, kind = measured(given, len(now.row)), type(module).__name__.removeprefix("FSDP")
        note("output", module=name, type=kind, rows=now.row, given=taken, returned=returned)


def keep(number, args, options):
    """Keep the arguments of a call, so that another world can train on the same rows."""
    leaves = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
    room[0] -= sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    if room[0] > 0 and not any(leaf.requires_grad for leaf in leaves):
        kept.append([now.steps, number, [leaf.detach().cpu().clone() for leaf in leaves], []])


def replayed(number, given):
    """Return arguments with the rows that the other world's ranks trained on in the same step, as they come."""
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    size = next((len(leaf) for leaf in leaves if leaf.dim()), 0)
    long = [place for place, leaf in enumerate(leaves) if leaf.dim() and len(leaf) == size]
    begin = used.get(number, 0)
    used[number] = end = begin + size
    now.targets = []
    order = order_of(number)
    try:
        whole = [torch.cat([part[2][place] for part in order])[begin:end] for place in long]
        losses = [
            torch.cat(several)[begin:end] for several in zip(*(part[3] for part in order), strict=True)
        ]
    except (RuntimeError, IndexError, ValueError):  # of unequal shapes, such as padded to another length
        return given
    if any(new.shape != leaves[place].shape for new, place in zip(whole, long, strict=True)):
        return given
    now.targets = losses
    fresh = dict(zip((id(leaves[place]) for place in long), whole, strict=True))
    return tree_map(lambda leaf: fresh[id(leaf)].to(leaf.device) if id(leaf) in fresh else leaf, given)


def order_of(number) -> list:
    """Return what the other world's ranks kept of a call in this step, in the order of the microbatches."""
    if not source:
        source.extend(torch.load(file, weights_only=False) for file in ORDER["rows"])
    ranks = [[part for part in rank if part[:2] == [now.steps, number]] for rank in source]
    return [part for parts in zip(*ranks, strict=False) for part in parts]


def loss(function, name):
    """Keep the targets of a loss that is computed outside of the model, or replace them by those of a replay."""

    def watched(input, target, *args, **options):
        if torch.is_grad_enabled() and not now.depth and isinstance(target, torch.Tensor) and target.dim():
            if ORDER["rows"] and now.targets:
                target = now.targets.pop(0).reshape(target.shape).to(target)
            elif kept and now.rows and now.rows[-1] and target.numel() % len(now.rows[-1]) == 0:
                kept[-1][3].append(target.detach().cpu().clone().reshape(len(now.rows[-1]), -1))
        if torch.is_grad_enabled() and name == "cross_entropy" and not target.is_floating_point():
            ignored = options.get("ignore_index", args[2] if len(args) > 2 else -100)
            if not hasattr(target, "placements"):
                # a target that is ignored, such as padding, is none
                now.terms += int((target != ignored).sum())
        return function(input, target, *args, **options)

    return watched

"""Copies of a reader's module in which something is different, for a plan: few blocks, one rank's part, adapters.

None of them has numbers: the module lies on meta, and a copy's tensors are fake ones.
"""

import copy
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from mpdemo.models.private_torch import keystr
from mpdemo.tools.plan.layers import shared
from mpdemo.tools.plan.loading import LARGEST_READ

aten = torch.ops.aten
# what takes long and is not large: matrix products, convolutions and attention, but no scores of its own
PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.convolution.default),
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
COLUMNS = {  # names of Linears that tensor parallelism splits by columns, and those that it splits by rows
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "wq",
        "wk",
        "wv",
        "wqkv",
        "qkv",
        "query",
        "key",
        "value",
        "c_attn",
    ),
    *("gate_proj", "up_proj", "gate_up_proj", "gate", "up", "w1", "w3", "fc1", "c_fc", "linear1"),
}
ROWS = {"o_proj", "wo", "out_proj", "proj", "c_proj", "out", "down_proj", "down", "w2", "fc2", "linear2"}
ATTENTION = {"q_proj", "qkv_proj", "wq", "wqkv", "qkv", "query", "c_attn"}
NO_HEADS = (
    "dim",
    "size",
    "width",
    "len",
    "emb",
    "hd",
    "idx",
    "index",
    "layer",
    "rep",
    "group",
    "window",
)  # other numbers


class NoVariant(Exception):
    """Why a module has no such variant, in words."""


def with_blocks(module, name, count) -> nn.Module:
    """Return a copy with the first `count` blocks of the list `name`."""
    whole = module.get_submodule(name)
    memo = {id(whole): type(whole)()}
    few = copy.deepcopy(module, memo)
    for key, block in list(whole.named_children())[:count]:
        few.get_submodule(name).add_module(key, copy.deepcopy(block, memo))
    return few


def without_values(template, device="cpu") -> nn.Module:
    """Return a copy with uninitialised tensors, fake ones within ``FakeTensorMode``.

    A short buffer of whole numbers keeps its own: a position in a queue, for instance, which the module reads.
    """
    empty = {}
    for module in template.modules():
        for tensor in (*vars(module).values(), *module._buffers.values(), *module._parameters.values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in empty:
                empty[id(tensor)] = _without_values(tensor, device)
    return copy.deepcopy(template, empty)  # takes these for the tensors that it would copy


def _without_values(tensor, device):
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.empty_like(tensor, device=device), tensor.requires_grad)
    whole = tensor.dtype in (torch.int64, torch.int32)
    if whole and not tensor.is_meta and tensor.numel() <= LARGEST_READ:
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype, device="cpu")
    return torch.empty_like(tensor, device=device)


def recompute(layers, kept=()):
    """Let the backward pass compute these layers once more, but for what operations that are `kept` have computed."""
    contexts = partial(create_selective_checkpoint_contexts, list(kept)) if kept else noop_context_fn
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def split_layers(layers, parts) -> list:
    """Shrink the Linears of these layers to one rank's part, by columns and then rows; return those split by rows.

    The numbers of heads beside them shrink as well. `NoVariant` says why it cannot be.
    """
    by_rows = []
    for owner in [part for layer in layers for part in layer.modules()]:
        linears = {name: child for name, child in owner.named_children() if isinstance(child, nn.Linear)}
        columns, rows = _sides(linears)
        if isinstance(owner, nn.MultiheadAttention):
            raise NoVariant(
                "nn.MultiheadAttention has query, key and value in one parameter, which is no Linear"
            )
        if bool(columns) != bool(rows):
            alone, other = (columns, "o_proj, down_proj") if columns else (rows, "q_proj, up_proj")
            raise NoVariant(
                f"{type(owner).__name__} has {', '.join(alone)} and no Linear like {other} beside it"
            )
        if splits_attention(owner):
            for attribute, value in heads_of(owner).items():
                if value % parts:
                    raise NoVariant(f"{attribute} = {value} does not divide by {parts}")
                setattr(owner, attribute, value // parts)
        for name in columns + rows:
            setattr(owner, name, _part(name, linears[name], parts))
        by_rows += [owner.get_submodule(name) for name in rows]
    if not by_rows:
        raise NoVariant(
            "its blocks have no Linears that are named like q_proj, o_proj, up_proj and down_proj"
        )
    return by_rows


def in_words(layers) -> str:
    """Say how the Linears of these layers would be split, for a model that does not run so."""
    parts = [
        (name.rpartition(".")[2], part) for layer in layers for name, part in layer.named_modules() if name
    ]
    names = {name for name, part in parts if isinstance(part, nn.Linear)}
    columns, rows = _sides(names)
    whole = sorted(names.difference(columns, rows)) or ["none"]
    return (
        f"a block does not run with its Linears split by their names, {', '.join(columns)} by columns and "
        f"{', '.join(rows)} by rows, and {', '.join(whole)} whole: either one should be named like q_proj, o_proj, "
        "up_proj or down_proj, or its code says how wide the split values are, as in reshape(batch, length, width), "
        "where -1 does"
    )


def _sides(names) -> tuple:
    """Return which of these names are split by columns, and which by rows."""
    return tuple(sorted(name for name in names if name.lower() in known) for known in (COLUMNS, ROWS))


def _part(name, linear, parts):
    """Return one rank's part of a Linear."""
    by_columns = name.lower() in COLUMNS
    width, what = (linear.out_features, "columns") if by_columns else (linear.in_features, "rows")
    if width % parts:
        raise NoVariant(f"{name} has {width} {what}, which do not divide by {parts}")
    size = (linear.in_features, width // parts) if by_columns else (width // parts, linear.out_features)
    kind = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    return nn.Linear(*size, bias=linear.bias is not None, **kind).requires_grad_(
        linear.weight.requires_grad
    )


def splits_attention(owner) -> bool:
    """Return whether a module has Linears that make queries."""
    return any(
        name.lower() in ATTENTION and isinstance(part, nn.Linear) for name, part in owner.named_children()
    )


def heads_of(owner) -> dict:
    """Return the attributes of an attention that are numbers of heads: they leave 8 to 256 numbers to each."""
    widths = [part.out_features for name, part in owner.named_children() if name.lower() in COLUMNS]
    return {
        name: value
        for name, value in vars(owner).items()
        if type(value) is int
        and value > 1
        and not any(part in name.lower() for part in NO_HEADS)
        and any(width % value == 0 and 8 <= width // value <= 768 for width in widths)
    }


def told(module, blocks, unused) -> list:
    """Return what a reader may not know of a module: what is shared, what gets no gradient, and no heads."""
    notes = [f"{' and '.join(names)} are one parameter, which is counted once" for names in shared(module)]
    if any(isinstance(part, nn.RNNBase) for part in module.modules()):
        notes.append("of recurrent layers the gates and states are counted; cuDNN may keep more")
    for owner in {type(part): part for block in blocks for part in block.modules()}.values():
        sizes = [value for value in vars(owner).values() if type(value) is int and 8 <= value <= 256]
        if splits_attention(owner) and not (
            heads_of(owner) or sizes
        ):  # by a head's size its code finds their number
            notes.append(
                f"{type(owner).__name__} has no attribute that looks like a number of heads, so tensor parallelism "
                "divides none; if its code has one elsewhere, those rows need less memory than they say"
            )
    if unused:
        some = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
        notes.append(
            f"no gradient reaches {some}; DDP stops at its second step without find_unused_parameters"
        )
    return notes


def not_scaled(paths, like, samples) -> list:
    """Return a note that names the inputs whose first size is not that of the first one."""
    names = [
        keystr(path).replace("']['", ".").replace("['", "").replace("']", "")
        for path, leaf in zip(paths, like, strict=True)
        if isinstance(leaf, tuple) and leaf[0][:1] != (samples,)
    ]
    return [
        f"--batch does not scale {', '.join(names)}: the first size is not {samples}, as the first input's, so it "
        "stays as you gave it"
    ] * bool(names)


class Adapted(nn.Module):
    """A frozen Linear and LoRA's two small ones beside it (https://arxiv.org/abs/2106.09685)."""

    def __init__(self, linear, rank, dtype):
        super().__init__()
        self.linear, kind = linear, {"bias": False, "device": linear.weight.device, "dtype": dtype}
        self.down = nn.Linear(linear.in_features, rank, **kind)
        self.up = nn.Linear(rank, linear.out_features, **kind)

    def forward(self, x):
        """Add what the adapter computes."""
        return self.linear(x) + self.up(self.down(x))


def adapt(module, layers, rank, dtype=torch.bfloat16):
    """Freeze a module, in bf16, and put adapters of this rank beside the Linears of these layers."""
    frozen = {}  # a shared parameter stays one
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None and old not in frozen:
                kind = torch.bfloat16 if old.is_floating_point() else old.dtype
                frozen[old] = nn.Parameter(torch.empty_like(old, dtype=kind), requires_grad=False)
            part._parameters[name] = frozen.get(old)
    for owner in [part for layer in layers for part in layer.modules()]:
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(owner, nn.MultiheadAttention):
                setattr(owner, name, Adapted(child, rank, dtype))
    if not any(isinstance(part, Adapted) for part in module.modules()):
        raise NoVariant("its blocks have no Linears beside which an adapter could stand")

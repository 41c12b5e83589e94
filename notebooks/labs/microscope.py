"""What autograd holds of a step of a GPT, by layer, however two processes split it; the gradients are one device's.

    torchrun --standalone --nproc-per-node=2 -m mpdemo.labs.microscope runs/46_held

Rank 0 writes ``summary.json``: for each way of `WAYS`, the bytes that each rank holds at its peak, by layer.
The processes compute on CPU cores. Taught in notebooks/46_activations.ipynb.
"""

import os
import sys
from collections import Counter, OrderedDict
from copy import deepcopy
from functools import partial
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mpdemo.labs.tokens import Gather, all_gather, reduce_scatter
from mpdemo.measure.compare import write_result
from mpdemo.paths import root
from mpdemo.world.collectives import gather_objects, whole
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.processes import end

sys.path.append(str(root() / "notebooks" / "scripts"))
from gpt import LENGTH, Block  # noqa: E402 - one of the scripts to take home

ROWS, WIDTH, HEADS, BLOCKS = 32, 64, 4, 4
MICROBATCHES = 4


class Held:
    """A tensor that autograd holds, and the layer that it's held for; both go with the graph."""

    def __init__(self, tensor, layer):
        self.tensor, self.layer = tensor, layer


class Microscope(saved_tensors_hooks):
    """Note what autograd holds at the peak of a `with` block: bytes by layer.

    Without weights and batch. What several layers hold counts once, for the first of them.
    """

    def __init__(self, model, batch=()):
        super().__init__(self.hold, lambda held: held.tensor)
        self.model, self.batch, self.layer = model, batch, "residual stream and norms"
        self.held, self.numbers, self.fullest = WeakValueDictionary(), count(), Counter()
        for block in (layer for layer in model.modules() if isinstance(layer, Block)):
            parts = (block.norm1, block.qkv, "attention"), (block.norm2, block.up, "MLP")
            for norm, first, part in parts:
                norm.register_forward_pre_hook(partial(self.enter, "residual stream and norms"))
                first.register_forward_pre_hook(partial(self.enter, "inputs of qkv and up"))
                first.register_forward_hook(partial(self.enter, part))
            block.register_forward_hook(partial(self.enter, "residual stream and norms"))

    def enter(self, layer, *_):
        self.layer = layer

    def hold(self, tensor):
        self.held[next(self.numbers)] = held = Held(tensor, self.layer)
        if (now := self.bytes()).total() > self.fullest.total():
            self.fullest = now
        return held

    def bytes(self):
        storages = {storage(t): None for t in (*self.model.parameters(), *self.batch)}
        for held in self.held.values():
            storages.setdefault(storage(held.tensor), held.layer)
        sizes = Counter()
        for (_, size), layer in storages.items():
            sizes[layer] += size
        del sizes[None]  # weights and batch
        return sizes


@torch.no_grad()
def storage(tensor):
    """Return what tells the memory of this rank's tensor from others, and its bytes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.wait() if hasattr(local, "wait") else local  # a collective's result on its way
    memory = local.untyped_storage()
    return memory._cdata, memory.nbytes()


# --- the ways: each takes the model, and returns what this rank has of it and its step


def single(model, mesh):
    return model, lambda tokens, arriving: model(tokens).backward(arriving)


def recomputation(model, mesh):
    def step(tokens, arriving):
        x = model[0](tokens)
        for block in model[1:]:
            # the other form hides what it holds from our hooks
            x = checkpoint(block, x, use_reentrant=True)
        x.backward(arriving)

    return model, step


def stages(schedule, microbatches, model, mesh):
    rank = dist.get_rank()
    stage = nn.Sequential(OrderedDict(list(model.named_children())[3 * rank :][:3]))
    with torch.device("meta"):
        x = torch.empty(ROWS // microbatches, LENGTH, WIDTH, requires_grad=True)
        shapes = torch.empty(ROWS // microbatches, LENGTH, dtype=torch.long), x, x
    stage_of = PipelineStage(
        stage, rank, 2, torch.device("cpu"), input_args=shapes[rank], output_args=shapes[rank + 1]
    )
    schedule = schedule(
        stage_of, microbatches, loss_fn=lambda x, arriving: (x * arriving).sum(), scale_grads=False
    )

    def step(tokens, arriving):
        schedule.step(tokens) if rank == 0 else schedule.step(target=arriving)

    return stage, step


def fsdp(model, mesh):
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    # it averages over two ranks
    return model, lambda tokens, arriving: own_part(0, model, tokens, 2 * arriving)


def own_part(dim, model, tokens, arriving):
    """Do a step with this rank's samples (dim 0) or tokens (dim 1)."""
    own, gradient = (tensor.chunk(2, dim)[dist.get_rank()].contiguous() for tensor in (tokens, arriving))
    model(own).backward(gradient)


def tensor(model, mesh):
    columns, rows = tp.ColwiseParallel(), tp.RowwiseParallel()
    for block in model[1:]:
        tp.parallelize_module(block, mesh, {"qkv": columns, "out": rows, "up": columns, "down": rows})
    return single(model, mesh)


def sequence(model, mesh, **columns):
    rows, norm = tp.RowwiseParallel(output_layouts=Shard(1)), tp.SequenceParallel(use_local_output=True)
    for block in model[1:]:
        tp.parallelize_module(
            block, mesh, {"norm1": norm, "out": rows, "norm2": norm, "down": rows} | columns
        )
    return model, partial(own_tokens, model)


def gathering_again(model, mesh):
    """Sequence parallelism as in Megatron-LM: what autograd holds of an input are this rank's tokens."""
    for layer in (layer for block in model[1:] for layer in (block.qkv, block.up)):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
        layer.forward = partial(lambda layer, part: GatherAgain.apply(part, layer.weight.to_local()), layer)
    return sequence(model, mesh)


def own_tokens(model, tokens, arriving):
    own_part(1, model, tokens, arriving)
    for weight in model.parameters():
        if not isinstance(weight, DTensor):  # which is on all ranks, and has seen its own tokens on each
            dist.all_reduce(weight.grad)


def context(model, mesh):
    rank, length = dist.get_rank(), LENGTH // 2
    queries = torch.arange(length)[:, None] + rank * length

    def attend(q, k, v, is_causal):
        mask = torch.arange(LENGTH) <= queries
        return scaled_dot_product_attention(q, Gather.apply(k), Gather.apply(v), attn_mask=mask)

    for block in model[1:]:
        block.attend, block.angles = attend, block.angles.chunk(2)[rank]
    return model, partial(own_tokens, model)


class GatherAgain(torch.autograd.Function):
    """A layer of the tokens of all ranks, of which autograd holds this rank's."""

    @staticmethod
    def forward(ctx, part, weight):
        ctx.save_for_backward(part, weight)
        return linear(all_gather(part), weight)

    @staticmethod
    def backward(ctx, gradient):
        part, weight = ctx.saved_tensors
        inputs = all_gather(part)
        return reduce_scatter(gradient @ weight), gradient.flatten(0, 1).T @ inputs.flatten(0, 1)


def attend(q, k, v, is_causal):
    """Attend as the block does, to a copy of v: a view would hold the whole output of qkv, and hide the keys."""
    return scaled_dot_product_attention(q, k, v.contiguous(), is_causal=is_causal)


GATHERED = tp.ColwiseParallel(input_layouts=Shard(1))
WAYS = {  # name -> what prepares it
    "one device": single,
    "recomputation": recomputation,
    "split in two": partial(stages, ScheduleGPipe, 1),
    "1F1B": partial(stages, Schedule1F1B, MICROBATCHES),
    "FSDP": fsdp,
    "tensor parallel": tensor,
    "sequence parallel": partial(sequence, qkv=GATHERED, up=GATHERED),
    "gathered again": gathering_again,
    "context parallel": context,
}


def look(model, way, mesh, batch) -> tuple[dict, dict]:
    """Return the bytes held at the peak of a step, and the gradients of what this rank has, by name."""
    part, step = WAYS[way](model, mesh)
    with (microscope := Microscope(part, batch)):
        step(*batch)
    return microscope.fullest, {name: whole(weight.grad) for name, weight in part.named_parameters()}


def measure(world) -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, WIDTH), *(Block(WIDTH, HEADS) for _ in range(BLOCKS)))
    for block in model[1:]:
        block.attend = attend
    batch = torch.randint(0, 256, (ROWS, LENGTH)), torch.randn(ROWS, LENGTH, WIDTH)
    mesh, held, right = init_device_mesh("cpu", (2,)), {}, {}
    for way in WAYS:
        held[way], gradients = look(deepcopy(model), way, mesh, batch)
        right = right or gradients  # of one device
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-4)
    return {"held": {way: gather_objects(dict(parts)) for way, parts in held.items()}}


if __name__ == "__main__":
    os.environ |= ON_THE_CPU
    end(write_result(sys.argv[1], measure))

"""One step of a model on fake tensors: what a process holds, computes and sends, phase by phase.

A fake tensor has a shape and no storage, and PyTorch's "fake" process group delivers nothing and waits for nothing. So
one process on any machine plays each rank of any training, and counts what it allocates and hands to its neighbours.
It is computed with a few of the equal blocks; own_scaling.py tells the whole model's step from two of these.
"""

import gc
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from mpdemo.errors import error_line
from mpdemo.models.private_torch import FakeStore, FakeTensors, backward, without_cuda_guards
from mpdemo.predict.counting import CountMessages, LiveMemory, local, size
from mpdemo.tools.plan import variants
from mpdemo.tools.plan.gpu_operations import OnGpu, in_eager_mode
from mpdemo.tools.plan.kernels import KeptByProducts, Kernels
from mpdemo.tools.plan.layers import FEW, differentiable
from mpdemo.tools.plan.loading import quiet
from mpdemo.tools.plan.request import IN_BLOCKS, NotPlanned
from mpdemo.tools.plan.roof import kernel_seconds


class Way(NamedTuple):
    """How one process computes its part of a step."""

    half: str = ""  # how it computes in 16 bits, as "autocast" or as "bf16", if it does
    checkpointing: bool = False  # activation checkpointing of the blocks
    selective: bool = False  # which keeps what products have computed
    offload: bool = False  # weights, gradients and states to the host, by FSDP
    shards: int = 1  # processes that share weights, gradients and states (FSDP)
    copies: int = 1  # of these shards, one per node (HSDP)
    tensor: int = 1  # processes that split the Linears of every block
    held: bool = False  # whether the gradients of an earlier microbatch are there
    stage: bool = False  # of a pipeline: its weights stay cast and its gradients whole between microbatches
    rank: int = 0  # of LoRA's adapters; 0: none
    compiled: bool = False  # by torch.compile

    @property
    def is_sharded(self):
        """Whether FSDP divides the model, or casts it, as PyTorch's replicate does as well."""
        return self.shards * self.copies > 1 or self.offload or (self.half == "bf16" and not self.rank)


class Step(NamedTuple):
    """What one process does in a step; dictionaries by phase, in order."""

    levels: dict  # arrays: the bytes of all tensors, each time that they grew
    work: dict  # arrays of `Kernels.work`
    sent: dict  # collective -> an array: bytes, messages
    weights: int  # bytes, as the next ones; of one process
    trained: int  # the gradients
    buffers: int
    crossing: list  # bytes that each layer hands to the next one; of equal blocks only the last one's
    inner: int = 1  # blocks that are computed as the phases called inner

    @property
    def peak(self):
        """Bytes at the peak."""
        return max(levels.max() for levels in self.levels.values())

    def seconds(self, roof, phases=None):
        """Return the seconds of some phases, or of all, on a GPU; None where it has no units for a precision."""
        total = 0.0
        for name in self.work if phases is None else phases:
            spent = kernel_seconds(self.work[name], roof)
            if spent is None:
                return None
            total += spent * (self.inner if name.endswith("inner") else 1)
        return total

    def with_blocks(self, more, count):
        """Return the step with `count` blocks, from this one with `FEW[0]` and another one with `FEW[1]`.

        None where the two do other operations.
        """
        times = count - FEW[0]
        found = self._replace(work=more.work, crossing=more.crossing).towards(more, times)
        return found and found._replace(inner=times)

    def towards(self, other, share):
        """Extend the line from this step to one of another size; None where they do other operations."""
        lines = []
        for a, b in zip(self[:3], other[:3], strict=True):  # the dictionaries
            if a.keys() != b.keys() or any(len(a[name]) != len(b[name]) for name in a):
                return None
            lines.append({name: a[name] + share * (b[name] - a[name]) for name in a})
        sizes = [a + share * (b - a) for a, b in zip(self[3:6], other[3:6], strict=True)]
        return Step._make([*lines, *sizes, *self[6:]])


@cache
def computed(model, way, states, size, count) -> Step:
    """Compute one step with `count` of the equal blocks."""
    with ThreadPoolExecutor(1) as thread:  # DTensor keeps what it has found of meshes for each thread
        try:
            return thread.submit(step, model, way, states, size, count).result()
        except (variants.NoVariant, NotPlanned) as error:
            raise NotPlanned(str(error)) from None
        except Exception as error:
            if way.tensor > 1:
                raise NotPlanned(variants.in_words(model.blocks_of(model.template))) from error
            why = f"a step like that fails on tensors without numbers ({error_line(error)})"
            raise NotPlanned(why) from error


def step(model, way, states, batch, count) -> Step:
    """Compute one step in this thread, as one process of a world that sends nothing."""
    world = fake_world(way.shards * way.copies) if way.is_sharded else nullcontext()
    memory, sent, kernels = LiveMemory(), CountMessages(), Kernels()
    fake = FakeTensors(allow_non_fake_inputs=True)
    with world, quiet(), memory, without_surprises():
        with fake:
            module = model.copy(count)
        kernels.kept = KeptByProducts() if way.compiled else None
        phases = Phases(memory, kernels)
        _vary(model, module, way, fake, sent, phases)
        with fake:
            trained = [p for p in module.parameters() if p.requires_grad]
            kept = [[torch.empty_like(local(p)) for _ in range(states)] for p in trained if not way.offload]
            whole = module.parameters(), trained, module.buffers()
            weights, gradients, buffers = (size([local(t) for t in tensors]) for tensors in whole)
            for p in trained if way.held and not way.stage else []:
                p.grad = torch.empty_like(p)
            if way.offload:
                phases.offload(module)
            if way.stage:  # the earlier microbatch leaves copies of weights, and sums of gradients
                backward(model.loss(model.compute(module, model.inputs(batch))))
            phases.begin()
            on_gpu = OnGpu(way.compiled)
            with kernels, sent if way.is_sharded else nullcontext(), on_gpu:
                inputs = model.inputs(batch, in_16_bits=way.rank and way.half == "bf16")
                with (
                    kernels.kept or nullcontext(),
                    torch.autocast("cpu", torch.bfloat16, enabled=way.half == "autocast"),
                ):
                    outputs = model.compute(module, inputs)
                on_gpu.compiled = False  # outside the module
                loss = model.loss(outputs)  # inputs and outputs stay, as in a loop that a reader writes
                on_gpu.compiled = way.compiled  # of blocks that are recomputed
                phases.enter("backward")
                backward(loss)
            phases.enter("end")
            del kept, inputs
    each = defaultdict(lambda: np.zeros(2))
    for kind, bytes_ in sent.messages:
        each[kind] += bytes_, 1
    return Step(*phases.found(), dict(each), weights + buffers, gradients, buffers, phases.crossing)


def _vary(model, module, way, fake, sent, phases):
    """Make a copy of the model what a process has of it, and follow its blocks."""
    blocks = model.blocks_of(module)
    with fake:
        if way.rank:
            variants.adapt(
                module, blocks, way.rank, torch.bfloat16 if way.half == "bf16" else torch.float32
            )
        by_rows = variants.split_layers(blocks, way.tensor) if way.tensor > 1 else []
    if way.checkpointing:
        variants.recompute(blocks, variants.PRODUCTS if way.selective else ())
    if way.is_sharded:
        _shard(module, model.layers_of(module), way)
    for linear in by_rows:
        linear.register_forward_hook(lambda linear, inputs, output: _count_reduction(sent, output))
    if model.few:
        phases.follow(blocks, ["first", "second", *["inner"] * (len(blocks) - 4), "last but one", "last"])
    elif model.chain:
        phases.follow(model.chain_of(module), map(str, range(model.count)))


def _shard(module, layers, way):
    """Divide the layers one by one, and what is left with the whole module.

    Autocast decides what is computed in 16 bits: its layers then hand on float32, as without FSDP.
    """
    if way.half and any(isinstance(part, _BatchNorm) for part in module.modules()):
        raise NotPlanned("batch norm keeps its averages in float32, so FSDP cannot compute it in 16 bits")
    names = {"mesh_dim_names": ("replicate", "shard")} if way.copies > 1 else {}
    mesh = init_device_mesh("cpu", (way.copies, way.shards) if way.copies > 1 else (way.shards,), **names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if way.half else MixedPrecisionPolicy()
    if way.half == "autocast":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, False)
    for layer in [*layers, module]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False if way.stage else None)
    if way.stage:  # as PyTorch's stages do for all microbatches but the last one
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)


def _count_reduction(sent, output):
    """Note the all-reduce of a layer that is split by rows, and of its gradient before the columns."""
    sent.messages.append((IN_BLOCKS, output.nbytes))
    if output.requires_grad:
        output.register_hook(lambda gradient: sent.messages.append((IN_BLOCKS, gradient.nbytes)))


class Phases:
    """What happens in each phase of a step: in the first block's forward pass, say, or the last one's backward pass."""

    def __init__(self, memory, kernels):
        self.memory, self.kernels, self.now, self.crossing = memory, kernels, None, []
        self.levels, self.work, self.on_host = defaultdict(list), defaultdict(list), []

    def offload(self, module):
        """Count the parameters of a sharded module on the host, and their gradients once a phase ends."""
        self.on_host = [p for p in module.parameters() if p.requires_grad]
        for p in module.parameters():
            self.memory.move(local(p).untyped_storage(), "host")

    def begin(self):
        """Begin the first phase, and forget all before."""
        self.enter("before")
        self.levels, self.work, self.crossing = defaultdict(list), defaultdict(list), []

    def enter(self, name):
        """Begin a phase; what happened since the last one began is that one's."""
        self.levels[self.now] += self.memory.levels["cpu"]
        self.work[self.now] += self.kernels.work
        if self.kernels.kept:
            self.kernels.kept.drop()
        for p in self.on_host:
            if p.grad is not None:
                self.memory.move(local(p.grad).untyped_storage(), "host")
        self.memory.start()
        self.kernels.work, self.now = [], name

    def follow(self, blocks, places):
        """Begin a phase where a block begins and ends, forward and backward; `places` are the blocks' names."""
        for block, place in zip(blocks, places, strict=True):
            after = "after" if block is blocks[-1] else f"between {place}"
            # Before FSDP's own hooks, which gather and free.
            block.register_forward_pre_hook(
                lambda _, inputs, place=place: self._begin(place, inputs), prepend=True
            )
            block.register_forward_hook(
                lambda _, inputs, outputs, place=place, after=after: self._end(place, outputs, after)
            )

    def _begin(self, place, inputs):
        if self.kernels.kept:
            self.kernels.kept.keep(inputs)
        self.enter(f"forward {place}")
        if place == "first":
            self._at_gradient(inputs, "backward before")

    def _end(self, place, outputs, after):
        self.enter(after)
        self.crossing.append(next((t.nbytes for t in differentiable(outputs)), 0))
        self._at_gradient(outputs, f"backward {place}")

    def _at_gradient(self, values, name):
        """Begin a phase when the gradient of the first tensor is there; a hook must return nothing."""
        for tensor in list(differentiable(values))[:1]:
            tensor.register_hook(lambda gradient: self.enter(name))

    def found(self):
        """Return levels and work by phase, as arrays."""
        names = [name for name in self.levels if name != "end"]
        kept = [name for name in names if not name.endswith("inner")]  # another block's peak is higher
        levels = {name: np.array(self.levels[name], dtype=float) for name in kept}
        return levels, {name: np.array(self.work[name], dtype=float).reshape(-1, 5) for name in names}


@contextmanager
def without_surprises():
    """Free nothing at a moment that differs from run to run, compile nothing, warn of nothing."""
    collected = gc.isenabled()
    gc.disable()
    try:
        with without_cuda_guards(), in_eager_mode(), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        if collected:
            gc.enable()


@contextmanager
def fake_world(processes):
    """Be the first of so many processes, of which no other is there: it delivers nothing and waits for nothing."""
    excepthook = sys.excepthook  # which PyTorch replaces
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook

"""Count what every block of a model allocates, computes and moves, on fake tensors: they have no storage.

Taught in notebooks/04_model_parallel.ipynb.
"""

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BLOCK = 512  # bytes; PyTorch's CUDA allocator hands out multiples of it
aten = torch.ops.aten
ON_A_CPU = {  # of attention on a CPU, which PyTorch counts from 2.15 on: that on a GPU takes the same operations
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class Meter(TorchDispatchMode):
    """A dispatch mode that counts live bytes and lists the operations between `start` and `stop`."""

    def __init__(self):
        super().__init__()
        self.live, self.storages = 0, weakref.WeakSet()
        self.start()

    def start(self):
        """Begin a measurement; byte counts are relative to this moment."""
        self.base, self.levels, self.work = self.live, [], []

    def stop(self):
        """End the measurement.

        Returns
        -------
        levels : list of int
            Live bytes after every allocation, and at the end.
        work : list of (int, int)
            Floating point operations, and bytes read and written, of every operation which is more than a view.
        """
        levels, work = [*self.levels, self.live - self.base], self.work
        self.start()
        return levels, work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        for tensor in outputs:
            self._allocate(tensor.untyped_storage())
        known = {t.untyped_storage() for t in inputs}
        in_place = func._schema.name.endswith("_")
        if in_place or not all(t.untyped_storage() in known for t in outputs):  # else a view, which moves nothing
            operation = func._overloadpacket
            formula = flop_registry.get(operation) or ON_A_CPU.get(operation)
            operations = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            self.work.append((operations, sum(t.nbytes for t in inputs + outputs)))
        return result

    def _allocate(self, storage):
        if storage in self.storages:
            return
        self.storages.add(storage)
        size = rounded(storage.nbytes())
        self.live += size
        self.levels.append(self.live - self.base)
        weakref.finalize(storage, self._free, size)

    def _free(self, size):
        self.live -= size


def rounded(size):
    """Return the bytes that PyTorch's allocator hands out for `size` bytes."""
    return -(-size // BLOCK) * BLOCK


class NextBlock(torch.autograd.Function):
    """Stands for what follows a block: its backward pass allocates the gradient of the block's output."""

    @staticmethod
    def forward(ctx, y):
        """Return a number, without keeping y."""
        ctx.shape = y.shape
        return y.new_empty(())

    @staticmethod
    def backward(ctx, gradient):
        """Return a gradient of the shape of y."""
        return gradient.new_empty(ctx.shape)


def run_blocks(build, size, shape, dtype=None):
    """Run every block of a model alone, forward and backward, on fake tensors.

    Parameters
    ----------
    build : callable
        Returns the uncut model (mpdemo.models.Blocks).
    size : int
        Samples of the microbatch.
    shape : tuple of int
        (C, S, S) of an image.
    dtype : torch.dtype, optional
        Of the samples.

    Returns
    -------
    list of (dict, dict)
        Per block: the fields of a Footprint; and name of a pass -> what `Meter.stop` returned.
    """
    rows, measured = [], {}  # equal blocks are run once
    with FakeTensorMode(allow_non_fake_inputs=True), Meter() as meter:
        blocks, x = build(), torch.empty(size, *shape, dtype=dtype)
        for number in range(len(blocks)):
            part = blocks.stage(number, number + 1)
            x = x.detach().requires_grad_(number > 0)  # images need no gradient; all after the first block does
            key = signature(part), x.shape, x.dtype, x.requires_grad
            if key not in measured:
                measured[key] = _passes(part, x, meter)
            passes, y = measured[key]
            rows.append((_facts(part, x.nbytes // size, y.nbytes // size), passes))
            x = y
    return rows


def signature(module) -> tuple:
    """Return what tells a block from another one: classes, plain attributes, parameters; of a traced one its graph."""
    plain = (bool, int, float, str, tuple, type(None), torch.dtype)
    parts = []
    for layer in module.modules():
        shapes = tuple(tuple(tensor.shape) for tensor in layer.parameters(recurse=False))
        if hasattr(layer, "graph"):
            parts.append((_operations(layer), shapes))
        else:
            attributes = sorted((key, repr(value)) for key, value in vars(layer).items() if isinstance(value, plain))
            parts.append((type(layer), tuple(attributes), shapes))
    return tuple(parts)


def _operations(traced) -> str:
    """Return the graph of a traced layer as text; numbers stand for its results, layers and tensors: no names."""
    numbers = {module: number for number, module in enumerate(traced.modules())}
    tensors = [name for name, _ in (*traced.named_parameters(), *traced.named_buffers())]
    results, lines = {}, []
    for node in traced.graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            target = numbers[traced.get_submodule(target)]
        elif node.op == "get_attr" and target in tensors:
            target = tensors.index(target)
        elif node.op in ("placeholder", "output"):
            target = ""
        lines.append((node.op, target, str(torch.fx.map_arg((node.args, node.kwargs), results.get))))
        results[node] = len(results)
    return str(lines)


def _facts(part, input_bytes, output_bytes):
    """Return the fields of a Footprint that no pass tells."""
    gradients = [rounded(p.nbytes) for p in part.parameters()]
    return {
        "name": part.names[0],
        "shapes": {name: tuple(parameter.shape) for name, parameter in part.named_parameters()},
        "weights": sum(gradients) + sum(rounded(buffer.nbytes) for buffer in part.buffers()),
        "buffers": sum(buffer.nbytes for buffer in part.buffers()),
        "gradients": sum(gradients),
        "largest": max(gradients, default=0),
        "input": input_bytes,
        "output": output_bytes,
    }


def _passes(part, x, meter):
    """Measure every pass of one block; return them with an empty output."""
    passes = {}

    def measure(name, work):
        meter.start()
        result = work()
        x.grad = None  # the block before counts it, as the gradient of its output
        passes[name] = meter.stop()
        return result

    for name in ("first_backward", "backward"):
        y = measure("forward", lambda: part(x))
        empty = torch.empty_like(y)
        loss, y = NextBlock.apply(y), None  # now only what autograd saved is still allocated
        measure(name, loss.backward)
    if not x.requires_grad or part.checkpointing:  # the images need no gradient, so all of it is the weight half
        return passes | {"input": ([0], []), "weight": passes["backward"]}, empty
    y = part(x)  # stays: the next block saves it, too
    loss = NextBlock.apply(y)
    groups = measure("input", lambda: stage_backward_input((loss,), None, [x], part.parameters())[1])
    measure("weight", lambda: stage_backward_weight(part.parameters(), groups))
    return passes, empty

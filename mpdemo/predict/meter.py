"""Run every block of a model alone on fake tensors, and count what it allocates, computes and moves."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from mpdemo.models import build
from mpdemo.models.private_torch import FakeTensors, TorchDispatchMode
from mpdemo.predict.counting import LiveMemory, has_16_bits, rounded, tensors_in
from mpdemo.predict.efficiency import ATTENTION, CONVOLUTION, CONVOLUTION_32, MEMORY, PRODUCT

aten = torch.ops.aten
ON_A_CPU = {  # of attention on a CPU, which PyTorch counts from 2.15 on: that on a GPU takes the same operations
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class Kernels(TorchDispatchMode):
    """Note every operation that is more than a view in `work`.

    That is (floating point operations of convolutions, of other products, of both in 16 bits, bytes read and written,
    which of `mpdemo.predict.efficiency.KINDS` it is).
    """

    def __init__(self):
        super().__init__()
        self.work = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the operations on this rank's part, which are counted
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # PyTorch asks each fake tensor for it, many times
            return result
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        known = {t.untyped_storage() for t in inputs}
        in_place = func._schema.name.endswith("_")
        message = func.namespace in ("c10d", "_c10d_functional")
        if not message and (in_place or not all(t.untyped_storage() in known for t in outputs)):  # views move nothing
            operation = func._overloadpacket
            formula = flop_registry.get(operation) or ON_A_CPU.get(operation)
            operations, kind = 0, MEMORY
            if formula:
                kind = kind_of(func._schema.name, has_16_bits(args[0]))
                shapes = every_head(args) if kind == ATTENTION else args
                operations = formula(*shapes, **(kwargs or {}), out_val=result)
            if inputs and has_16_bits(inputs[0]):
                parts = 0, 0, operations
            else:
                parts = (operations, 0, 0) if kind == CONVOLUTION_32 else (0, operations, 0)
            self.work.append((*parts, sum(t.nbytes for t in inputs + outputs), kind))
        return result


def kind_of(name, half) -> int:
    """Return the class of an operation that computes, by its name, and by whether it has 16 bits."""
    if "convolution" in name:
        return CONVOLUTION if half else CONVOLUTION_32
    return ATTENTION if "attention" in name else PRODUCT


def every_head(args) -> list:
    """Return the arguments of an attention with the shapes of keys and values that are there for every query.

    Several queries may share a key (grouped-query attention), which the formulas of PyTorch 2.11 do not count.
    """
    heads = max(t.shape[1] for t in tensors_in(args) if t.ndim == 4)
    return [(len(t), heads, *t.shape[2:]) if isinstance(t, torch.Tensor) and t.ndim == 4 else t for t in args]


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


def run_blocks(spec, size):
    """Return (facts, lines, work) of each block, as `mpdemo.predict.footprint.Footprint` has them, at one size."""
    rows, measured = [], {}  # equal blocks, which print the same, are run once
    with FakeTensors(allow_non_fake_inputs=True), LiveMemory() as memory, Kernels() as kernels:
        model = build(spec.model, **{name: value for name, value in spec._asdict().items() if name != "model"})
        x = torch.empty(size, spec.channels, spec.image_size, spec.image_size)
        for number in range(len(model)):
            part = model.stage(number, number + 1)
            x = x.detach().requires_grad_(number > 0)  # images need no gradient; all after the first block does
            key = str(part.blocks()), x.shape, x.dtype, x.requires_grad
            if key not in measured:
                measured[key] = _passes(part, x, memory, kernels)
            lines, work, y = measured[key]
            rows.append((_facts(part, x.nbytes // size, y.nbytes // size), lines, work))
            x = y
    return rows


def _facts(part, input_bytes, output_bytes):
    """Return the fields of a Footprint that no pass tells."""
    gradients = [rounded(p.nbytes) for p in part.parameters()]
    return {
        "name": part.names[0],
        "weights": sum(gradients) + sum(rounded(buffer.nbytes) for buffer in part.buffers()),
        "gradients": sum(gradients),
        "largest": max(gradients, default=0),
        "input": input_bytes,
        "output": output_bytes,
    }


def _passes(part, x, memory, kernels):
    """Run one block forward and backward; return the lines and the work, and an empty output."""
    lines, work = {}, {}

    def measure(name, run):
        memory.start()
        kernels.work, before = [], memory.live["cpu"]
        result = run()
        x.grad = None  # the block before counts it, as the gradient of its output
        work[name], lines[name] = list(kernels.work), memory.peak() - before
        return result, memory.live["cpu"] - before

    for _ in range(2):  # the second time gradients are added to
        y, saved = measure("forward", lambda: part(x))
        empty = torch.empty_like(y)
        loss, y = NextBlock.apply(y), None  # now only what autograd saved is still allocated
        measure("backward", loss.backward)
    return {"saved": saved, "backward": lines["backward"]}, work, empty

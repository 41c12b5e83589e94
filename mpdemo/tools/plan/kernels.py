"""Note what every kernel of a model computes and moves, on fake tensors."""

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from mpdemo.predict.counting import Watch, has_16_bits, tensors_in
from mpdemo.tools.plan.efficiency import ATTENTION, CONVOLUTION, CONVOLUTION_32, MEMORY, PRODUCT

aten = torch.ops.aten
# of attention on a CPU, which PyTorch counts from 2.15 on: that on a GPU takes the same operations
ON_A_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class Kernels(Watch):
    """Note every operation that is more than a view in `work`.

    That is (floating point operations of convolutions, of other products, of both in 16 bits, bytes read and written,
    which of `mpdemo.tools.plan.efficiency.KINDS` it is).
    """

    def __init__(self):
        super().__init__()
        self.work, self.kept = [], None

    def _watch(self, func, types, args, kwargs):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the operations on this rank's part, which are counted
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        known = {t.untyped_storage() for t in inputs}
        in_place = func._schema.name.endswith("_")
        message = func.namespace in ("c10d", "_c10d_functional")
        # views move nothing
        if not message and (in_place or not all(t.untyped_storage() in known for t in outputs)):
            operation = func._overloadpacket
            formula = flop_registry.get(operation) or ON_A_CPU.get(operation)
            operations, kind = 0, MEMORY
            if formula:
                if self.kept:
                    self.kept.keep(inputs + outputs)
                kind = kind_of(func._schema.name, has_16_bits(args[0]))
                shapes = every_head(args) if kind == ATTENTION else args
                operations = formula(*shapes, **kwargs, out_val=result)
            if inputs and has_16_bits(inputs[0]):
                parts = 0, 0, operations
            else:
                parts = (operations, 0, 0) if kind == CONVOLUTION_32 else (0, operations, 0)
            self.work.append((*parts, sum(t.nbytes for t in inputs + outputs), kind))
        return result


class KeptByProducts(saved_tensors_hooks):
    """In a ``with`` block, nothing is kept for the backward pass but what products read and write.

    So it is once torch.compile has fused what lies between: that is computed again as it is read, unless a product is
    to read it.
    """

    def __init__(self):
        super().__init__(self._pack, self._unpacked)
        self.products, self.held = set(), []

    def keep(self, values):
        """Keep the tensors in these values."""
        self.products |= {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(values)}

    def drop(self):
        """Let go of what was packed and no product has seen."""
        for held in self.held:
            if StorageWeakRef(held[0].untyped_storage()) not in self.products:
                held[0] = None
        self.held = []

    def _pack(self, tensor):
        self.held.append([tensor, tensor.size(), tensor.stride(), tensor.dtype])
        return self.held[-1]

    @staticmethod
    def _unpacked(held):
        tensor, size, stride, dtype = held
        return torch.empty_strided(size, stride, dtype=dtype) if tensor is None else tensor


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
    return [
        (len(t), heads, *t.shape[2:]) if isinstance(t, torch.Tensor) and t.ndim == 4 else t for t in args
    ]

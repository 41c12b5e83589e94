"""The model that is planned, any module: ``package.module:function`` or ``./file.py:function``, which returns it.

It may also be one of the course. It is built without its numbers, however large it is, and computes on fake tensors:
shapes, and no memory. Used by ``mpdemo plan --model``; taught in notebooks/72_which_one.ipynb.
"""

from functools import cache

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from mpdemo.errors import UserError, error_line
from mpdemo.models.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensors,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from mpdemo.predict.counting import LiveMemory, size
from mpdemo.tools.plan.gpu_operations import OnGpu, in_eager_mode
from mpdemo.tools.plan.kernels import Kernels
from mpdemo.tools.plan.layers import (
    FEW,
    blocks_in,
    differentiable,
    equal_blocks,
    layers_entered,
    loss,
    shared,
)
from mpdemo.tools.plan.loading import WithoutNumbers, called, imported, quiet
from mpdemo.tools.plan.variants import not_scaled, told, with_blocks, without_values

SAMPLES = 2  # of the batch on which a model is tried


def held_by(module) -> tuple:
    """Return the bytes of the weights of a module, with its buffers, and of their gradients."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return size([*module.parameters(), *module.buffers()]), size(trained)


class OwnModel:
    """A model that computes batches of any size on fake tensors.

    The function `name` takes no arguments and returns a module, or a module and its inputs; a model of the course
    brings its own `function`. Without inputs the samples have the `input_shape`, (C, S, S) of an image or (T,) of a row
    of tokens, which are whole numbers.

    `notes` are what the reader should know of the model. Where it has a list of more than five equal blocks and also
    computes with fewer, `few` is true, and `list` and `count` are its name and its length. Otherwise `chain` tells
    whether it is one layer after the other, `count` in all. `layers` are what FSDP divides one by one.
    """

    def __init__(self, name, input_shape=None, tokens=False, function=None):
        self.name, self.notes, self.returns_loss, self.chain = name, [], False, False
        self.template, inputs = called(function or imported(name), name)
        given = self._zeros(input_shape, tokens) if inputs is None else inputs
        (paths, leaves), self.structure = (
            zip(*tree_flatten_with_path(given)[0], strict=True),
            tree_flatten(given)[1],
        )
        self.like = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        self.samples = next((leaf[0] for leaf in self.like if isinstance(leaf, tuple)), None)
        if self.samples is None:
            raise UserError(
                f"--model {name}() returns inputs without a tensor; allowed: a tensor, a tuple or a dict"
            )
        self.notes += not_scaled(paths, self.like, self.samples[0])
        if any(is_lazy(p) for p in self.template.parameters()):
            with torch.no_grad(), quiet(), WithoutNumbers():
                self.compute(self.template, self.inputs(SAMPLES, "meta"))
        self.template = without_values(self.template, "meta")  # else its numbers would be counted as well
        self.list, self.count = equal_blocks(self.template)
        for count in FEW if self.count > FEW[1] else ():
            self._shortened(count)  # here, since a buffer on meta cannot be copied among fake tensors
        self.few = self.count > FEW[1] and self._learn(FEW[0]) is None and self._alike()
        if not self.few:
            self._learn_whole()
        self.notes += told(self.template, self.blocks_of(self.template), self.unused)

    def _zeros(self, input_shape, tokens):
        """Return a batch of the shape that the reader gives, of tokens or of the type of the weights."""
        if input_shape is None:
            raise UserError("a model of your own needs --input, the shape of a sample, such as 3,224,224")
        kinds = [p.dtype for p in self.template.parameters() if p.is_floating_point()]
        kind = torch.int64 if tokens else [*kinds, torch.float32][0]
        return torch.zeros(SAMPLES, *input_shape, dtype=kind, device="meta")

    def _learn(self, count):
        """Compute a batch with so many of the equal blocks, and learn from it; return the error if that fails."""
        with FakeTensors(allow_non_fake_inputs=True), in_eager_mode(), quiet(), OnGpu():
            module = self.copy(count)
            try:
                outputs, layers = layers_entered(module, lambda: self.compute(module, self.inputs(SAMPLES)))
                self._learn_loss(module, outputs)
            except Exception as error:  # of the reader's own code, or of tensors without numbers
                return error
        tied = [name for names in shared(module) for name in names]  # FSDP divides no part of them alone
        self.layers = [layer for layer in layers if not any(name.startswith(f"{layer}.") for name in tied)]
        return None

    def _learn_whole(self):
        """Learn from the model as it is, which may be one layer after the other."""
        self.list, self.count = None, 0
        chain = self.chain_of(self.template)
        if isinstance(chain, nn.Sequential) and len(set(chain)) == len(chain) > 1:
            self.chain, self.count = True, len(chain)
        if error := self._learn(self.count):
            raise self._refusal(error) from None

    def _alike(self) -> bool:
        """Return whether all blocks but the first compute, move and keep the same in a forward pass.

        A flag may make equal parameters do different things: recomputation in every second block, say.
        """
        memory, kernels, found = LiveMemory(), Kernels(), []

        def begin(*_):
            found.append((len(kernels.work), memory.live["cpu"]))

        def end(*_):
            start, held = found[-1]
            found[-1] = tuple(kernels.work[start:]), memory.live["cpu"] - held

        with (
            quiet(),
            memory,
            FakeTensors(allow_non_fake_inputs=True),
            in_eager_mode(),
            OnGpu(),
        ):
            module = self.copy(self.count)
            for block in blocks_in(module.get_submodule(self.list)):
                block.register_forward_pre_hook(begin)
                block.register_forward_hook(end)
            try:
                with kernels:
                    outputs = self.compute(module, self.inputs(SAMPLES))  # which keep what the blocks keep
            except Exception:  # of the reader's own code
                return False
            del outputs
        return len(found) == self.count and len(set(found[1:])) == 1

    def _learn_loss(self, module, outputs):
        """Learn which parameters get a gradient, and whether the module computes its loss itself."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise UserError(f"--model {self.name} has no parameters to train; allowed: a model with some")
        found = list(differentiable(outputs))
        if not found:
            raise UserError(f"--model {self.name} returns nothing that depends on its parameters; allowed: a tensor, "
                            "or any collection of tensors")  # fmt: skip
        scalars = [t for t in found if t.dim() == 0]
        reached = []
        for tensors in (found, scalars)[: 1 + bool(scalars)]:
            of = torch.autograd.grad(
                loss(tensors), list(trained.values()), retain_graph=True, allow_unused=True
            )
            reached.append(
                [name for name, gradient in zip(trained, of, strict=True) if gradient is not None]
            )
        self.returns_loss = len(reached) > 1 and reached[0] == reached[1]
        self.unused = [name for name in trained if name not in reached[0]]

    def _refusal(self, error):
        if isinstance(error, UserError):
            return error
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            return UserError(
                f"--model {self.name} asks for values (of samples, weights or random numbers) while it computes, "
                "and a plan has none; allowed: a model of which only shapes decide what it computes"
            )
        what = f"a step of --model {self.name} with samples of shape {tuple(self.samples[1:])} does not run without"
        ask = (
            "are samples tokens? Then add --tokens"
            if "'indices'" in str(error)
            else "is that the shape of a sample?"
        )
        return UserError(f"{what} numbers ({error_line(error)}); {ask}")

    def described(self) -> str:
        """Return the shape of a sample and the types of the parameters, as text."""
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in self.template.parameters()})
        shape = " x ".join(str(size) for size in self.samples[1:])
        return f"samples of {shape or 1}; parameters in {' and '.join(kinds)}"

    @property
    def unit(self) -> tuple:
        """What is counted, tokens or images or else samples, and how many of them a sample is."""
        kind = next(leaf[1] for leaf in self.like if isinstance(leaf, tuple))
        if len(self.samples) == 2 and not kind.is_floating_point:
            return "tokens", self.samples[1]
        return ("images" if len(self.samples) == 4 else "samples"), 1

    @property
    def weights(self):
        """Bytes of parameters and buffers."""
        return held_by(self.template)[0]

    @property
    def batch_norm(self):
        """Whether a layer keeps averages, which stay in float32."""
        return any(isinstance(part, _BatchNorm) for part in self.template.modules())

    @property
    def all_trained(self):
        """Whether no parameter is frozen."""
        return all(p.requires_grad for p in self.template.parameters())

    @property
    def trained(self):
        """Bytes of all gradients."""
        return held_by(self.template)[1]

    @property
    def channels_first(self):
        """Whether a convolution has its weights, and so its images, with the channels first."""
        convolutions = [part for part in self.template.modules() if isinstance(part, nn.Conv2d)]
        return not all(
            part.weight.is_contiguous(memory_format=torch.channels_last) for part in convolutions
        )

    @cache  # noqa: B019 - as long as the model
    def _shortened(self, count):
        return with_blocks(self.template, self.list, count) if count != self.count else self.template

    def copy(self, count) -> nn.Module:
        """Return a copy with so many of the equal blocks, on fake tensors within a ``FakeTensorMode``."""
        return without_values(self._shortened(count))

    def inputs(self, size, device="cpu", in_16_bits=False):
        """Return a batch of `size` samples, of zeros."""
        leaves = list(self.like)
        for number, leaf in enumerate(self.like):
            if isinstance(leaf, tuple):
                shape, kind = leaf
                shape = (size, *shape[1:]) if shape[:1] == self.samples[:1] else shape
                kind = torch.bfloat16 if in_16_bits and kind.is_floating_point else kind
                leaves[number] = torch.zeros(shape, dtype=kind, device=device)
        return tree_unflatten(leaves, self.structure)

    @staticmethod
    def compute(module, inputs):
        """Return what a module makes of a batch."""
        if isinstance(inputs, dict):
            return module(**inputs)
        return module(*(inputs if isinstance(inputs, list | tuple) else [inputs]))

    def around(self) -> list:
        """Return the bytes of weights and of gradients, each before the list of equal blocks and after it."""
        names = [name for name, _ in self.template.named_modules()]
        start = names.index(self.list)
        sizes = [[0, 0], [0, 0]]
        parameters = self.template.named_parameters(remove_duplicate=False)
        for name, tensor in (*parameters, *self.template.named_buffers()):
            owner = name.rpartition(".")[0]
            if not self._in_list(owner):
                side = names.index(owner) > start
                sizes[0][side] += tensor.nbytes
                sizes[1][side] += tensor.nbytes * tensor.requires_grad
        return sizes

    def sizes(self) -> list:
        """Return the bytes of weights and of gradients of each layer of a chain."""
        return list(map(held_by, self.chain_of(self.template)))

    @staticmethod
    def chain_of(module) -> nn.Module:
        """Return the list that a module is, without lists that have nothing else in them."""
        while isinstance(module, nn.Sequential) and len(module) == 1:
            module = module[0]
        return module

    def _in_list(self, name) -> bool:
        """Return whether a module is part of the list of equal blocks, which may be the whole model."""
        return name != self.list and name.startswith(f"{self.list}." if self.list else "")

    def loss(self, outputs):
        """Return the loss of a batch: the module's own, or one that stands in for it."""
        found = list(differentiable(outputs))
        return loss([t for t in found if t.dim() == 0] if self.returns_loss else found)

    def layers_of(self, module) -> list:
        """Return the layers of a copy that FSDP divides one by one."""
        others = [name for name in self.layers if not self._in_list(name)] if self.few else []
        return [module.get_submodule(name) for name in others] + self.blocks_of(module)

    def blocks_of(self, module) -> list:
        """Return the equal blocks of a copy; of a module without such a list, its layers."""
        if self.few:
            return blocks_in(module.get_submodule(self.list))
        return [module.get_submodule(name) for name in self.layers]

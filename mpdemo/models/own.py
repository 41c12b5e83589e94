"""A reader's own model, any module: ``package.module:function`` or ``./file.py:function``, which returns it.

Dry runs of one device, DDP and FSDP take it as it is (`Whole`). A pipeline needs blocks: `mpdemo.models.split` finds
them. Where that does not work the model stays one block, and `OwnModel.uncut` says why. Used by ``python -m mpdemo
plan --model``; taught in notebooks/11_which_one.ipynb.
"""

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mpdemo.errors import UserError, error_line
from mpdemo.models.blocks import Blocks
from mpdemo.models.split import blocks_of, each_with_parameters, layers_in_order, quiet, shared, traced
from mpdemo.models.whole import Whole, called, imported, rows_of_block, without_values

SAMPLES = 2  # of the batch on which a model is tried


class OwnModel:
    """A model that can be built for batches of any size, its weights without values.

    The function `name` takes no arguments and returns a module, or a module and its inputs. Without inputs the samples
    have the `input_shape`, (C, S, S) of an image or (T,) of a row of tokens, which are whole numbers. `uncut` says why
    the model is one block, "" where it could be split; `notes` what the reader should know of it.
    """

    def __init__(self, name, input_shape=None, tokens=False):
        self.name, self.given = name, (input_shape, tokens)
        self.uncut, self.notes, self.templates = "", [], {}
        self.function = imported(name)
        try:
            with torch.device("meta"):  # takes no memory, and no time
                self.template = self._made()
            self._try()
        except Exception:  # a model that asks for values while it is built
            self.template = self._made()
            self._try()

    @classmethod
    def wanted(cls, request):
        """Return the model that a `mpdemo.plan.command.Request` names."""
        return cls(request.model, request.input and tuple(map(int, request.input.split(","))), request.tokens)

    def _made(self) -> Whole:
        """Call the function; return what it makes, with all parameters, but perhaps without their values."""
        module, inputs = called(self.function, self.name)
        shape, tokens = self.given
        if inputs is None and shape is None:
            raise UserError("a model of your own needs --input, the shape of a sample, such as 3,224,224")
        if inputs is None:
            kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
            inputs = torch.zeros(SAMPLES, *shape, dtype=torch.int64 if tokens else [*kinds, torch.float32][0])
        self.input_shape, self.input_type = next(
            (leaf.shape[1:], leaf.dtype) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)
        )
        whole = Whole(module, inputs)
        if lazy := [p for p in module.parameters() if is_lazy(p)]:
            with torch.no_grad(), quiet():
                whole(self.samples(SAMPLES).to(lazy[0].device))
        return whole

    def _try(self):
        """Compute a batch forward and backward on fake tensors; learn the layers, and what no gradient reaches."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"), quiet():
            whole, x = self.whole(), self.samples(SAMPLES)
            try:
                outputs, entered, wide = layers_in_order(whole.module, lambda: whole(x))
                trained = [(name, p) for name, p in whole.module.named_parameters() if p.requires_grad]
                if trained:
                    outputs.sum().backward()
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise UserError(
                    f"--model {self.name} asks for values (of samples, weights or random numbers) while it computes, "
                    "and a plan has none; allowed: a model of which only shapes decide what it computes"
                ) from None
            except Exception as error:  # the reader's own code
                shape = tuple(self.input_shape)
                raise UserError(
                    f"--model {self.name} does not compute samples of shape {shape} ({error_line(error)})"
                ) from None
        if not trained:
            raise UserError(f"--model {self.name} has no parameters to train; allowed: a model with some")
        ties = shared(whole.module)
        unused = [name for name, p in trained if p.grad is None]
        self.notes = [f"{' and '.join(names)} are one parameter, which is counted once" for names in ties]
        if unused:
            some = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
            self.notes.append(
                f"no gradient reaches {some}; DDP stops at its second step without find_unused_parameters"
            )
        tied = {layer for names in ties for layer in entered for name in names if name.startswith(f"{layer}.")}
        self.layers, self.splits, self.ties = entered, [], ties
        self.template.layers = [name for name in wide if not any(f"{end}.".startswith(f"{name}.") for end in tied)]

    def whole(self) -> Whole:
        """Return a copy of the model without values, on fake tensors within a ``FakeTensorMode``."""
        return without_values(self.template)

    def at(self, size) -> Blocks:
        """Return a copy of the model as blocks for batches of `size`: a trace holds for one size alone."""
        if size not in self.templates:
            with _disable_current_modes(), quiet():  # nothing of this is counted in a dry run
                blocks = self._blocks(without_values(self.template), size)
                if len(blocks) > 1 and (reason := _refused(blocks, self.samples(size))):
                    self.uncut, blocks = reason, {"model": without_values(self.template)}
                self.templates[size] = Blocks(blocks).to("meta")
        return without_values(self.templates[size])

    def with_values(self, size, device):
        """Return the model as the function makes it, to compute with it; as blocks for batches of `size`, if given."""
        with quiet():
            model = self._made()
            model.layers = self.template.layers
            if size:
                model = Blocks(self._blocks(model.to(device), size, device)).cpu()
        model.input_shape, model.input_type = self.input_shape, self.input_type
        return model

    def _blocks(self, whole, size, device="cpu"):
        """Return the blocks by name; a trace holds fast on which device its tensors are made."""
        blocks = blocks_of(whole.module)
        tied = {layer for names in self.ties for layer in self.layers if any(n.startswith(f"{layer}.") for n in names)}
        if len(tied) > 1:
            self.uncut, blocks = "stages cannot share a parameter", {}
        elif len(whole.like) > 1:
            self.uncut, blocks = "it takes several inputs", {}
        elif not blocks:
            blocks, self.uncut = traced(whole.module, self.splits or self.layers, self.samples(size).to(device))
            self.splits = list(blocks)  # the next trace, of another size, need not look for them
        blocks = each_with_parameters(blocks) or {"model": whole}
        reserved = {name for name in blocks if hasattr(Blocks, name.partition(".")[0])}  # such as "blocks.0"
        blocks = {f"model.{name}" if name in reserved else name: block for name, block in blocks.items()}
        if "model" not in blocks:
            blocks[list(blocks)[-1]].register_forward_hook(rows_of_block)
        return blocks

    def samples(self, size) -> torch.Tensor:
        """Return a batch of zeros in the shape and the type of the samples."""
        return torch.zeros(size, *self.input_shape, dtype=self.input_type, device="cpu")


def _refused(blocks, x) -> str:
    """Return why blocks cannot be stages, whose inputs have gradients; "" where they can."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = without_values(Blocks(blocks))
        x = torch.empty_like(x)
        for number, label in enumerate(parts.names):
            x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
            try:
                x = parts.stage(number, number + 1)(x)
            except Exception as error:  # the reader's own code
                return f"it cannot be cut before {label} ({error_line(error)})"
    return ""

"""Any module as named blocks, one fed by the other: a `torch.nn.Sequential` as it is, others traced (torch.export).

``torch.distributed.pipelining.pipeline`` splits a traced module where one of its layers begins. Source:
https://docs.pytorch.org/docs/stable/distributed.pipelining.html (Option 2: splitting a model automatically).
"""

import copy
import io
import logging
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise

from torch import nn

from mpdemo.models.blocks import Blocks

LISTS = nn.Sequential, nn.ModuleList, nn.ModuleDict
REPEATED = 3  # a list of so many layers of one kind is looked into, also inside another layer


def blocks_of(module, prefix="") -> dict:
    """Return the blocks of a `Blocks` or of (nested) `torch.nn.Sequential` by name, in order; {} of anything else."""
    if isinstance(module, Blocks):
        return {name: module.get_submodule(name) for name in module.names}
    if not isinstance(module, nn.Sequential):
        return {prefix: module} if prefix else {}
    inner = ((f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children())
    return {name: block for label, child in inner for name, block in blocks_of(child, label).items()}


def layers_in_order(module, compute) -> tuple:
    """Call a function that computes with a module; return its result, and layers that it enters once, in order.

    These are candidates for the blocks of a pipeline, and the layers that FSDP divides one by one: a whole list, where
    the module has a list of lists. All of them have parameters.
    """
    names, entered, hooks = _layers(module), [], []
    wide = {_wide(module, label) for label in names}
    for label in dict.fromkeys([*names, *wide]):
        layer = module.get_submodule(label)
        if any(True for _ in layer.parameters()):
            hooks.append(layer.register_forward_pre_hook(lambda *_, label=label: entered.append(label)))
    try:
        outputs = compute()
    finally:
        for hook in hooks:
            hook.remove()
    once = [label for label in dict.fromkeys(entered) if entered.count(label) == 1]
    return outputs, [label for label in once if label in names], [label for label in once if label in wide]


def _wide(module, label) -> str:
    """Return the layer of the module's own list that a layer is part of; of others the layer itself."""
    first, *rest = label.split(".")
    is_list = isinstance(module.get_submodule(first), LISTS) and len(rest) > 1
    inner = f"{first}.{rest[0]}" if is_list else label
    return inner if isinstance(module.get_submodule(inner), nn.Sequential) else label


def _layers(module, prefix="") -> list:
    """Return the names of children; of lists, and of layers that contain a long list, those of what is in them."""
    names = []
    for name, child in module.named_children():
        lists = [m for m in child.modules() if isinstance(m, LISTS) and len(m) >= REPEATED]
        alike = any(len({type(layer) for layer in layers.children()}) == 1 for layers in lists)
        names += _layers(child, f"{prefix}{name}.") if isinstance(child, LISTS) or alike else [prefix + name]
    return names


def shared(module) -> list:
    """Return the names of each parameter that has several."""
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def traced(module, layers, sample) -> tuple[dict, str]:
    """Split a copy of a module before each layer but the first, but not where more than one tensor is passed on."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    begins = layers[1:]
    while begins:
        try:
            spec = {name: SplitPoint.BEGINNING for name in begins}
            pipe = pipeline(copy.deepcopy(module), mb_args=(sample,), split_spec=spec)  # which marks the layers
        except Exception as error:  # torch.export refuses in many ways
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            return {}, f"torch.export cannot trace it ({reason})"
        calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
        if len(calls) != len(begins) + 1:
            return {}, "torch.export does not keep its layers apart"
        chained = [list(call.args) == [before] for before, call in pairwise(calls)]
        if all(chained):
            names = [layers[0], *begins]
            return {name: getattr(pipe.split_gm, call.target) for name, call in zip(names, calls, strict=True)}, ""
        alone = [count == 1 for count in tensors_passed(pipe.split_gm.graph, calls)]
        kept = chained if all(alone) else alone  # a tensor alone may still be no whole output of the layer before
        begins = [name for name, keep in zip(begins, kept, strict=True) if keep]
    return {}, "no two of its layers pass on one tensor alone"


def tensors_passed(graph, calls) -> list:
    """Return how many tensors are passed on before each call but the first: from all that is before to all after."""
    made = {}  # a node of the graph: the call that makes it
    for node in graph.nodes:
        made[node] = calls.index(node) if node in calls else max(map(made.get, node.all_input_nodes), default=-1)
    wanted = [node.all_input_nodes for node in calls]
    return [
        len({value for values in wanted[number:] for value in values if made[value] < number})
        for number in range(1, len(calls))
    ]


@contextmanager
def quiet():
    """Keep what torch.export logs, warns of and prints, many lines for each refusal, from the reader's terminal."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def each_with_parameters(blocks) -> dict:
    """Join a block without parameters (ReLU, Flatten) to the one before, and the first ones to the first with some.

    What changes its input in place then has it in its own block, and every backward pass has an end. Empty where no
    block has parameters.
    """
    groups, leading = {}, []
    for label, block in blocks.items():
        if any(parameter.requires_grad for parameter in block.parameters()):
            groups[label], leading = [*leading, block], []
        elif groups:
            groups[list(groups)[-1]].append(block)
        else:
            leading.append(block)
    return {label: nn.Sequential(*group) if len(group) > 1 else group[0] for label, group in groups.items()}

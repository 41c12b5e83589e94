"""Check of sitting 12: accumulation."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def check_12_1(accumulate):
    for parts in (3, 4):
        require_accumulation(accumulate, parts)


def require_accumulation(accumulate, parts):
    """Require one step on 12 images in some parts, with an older gradient in place."""
    images, labels, model = (
        torch.linspace(-1, 1, 36).reshape(12, 3).sin(),
        torch.arange(12) % 3,
        nn.Linear(3, 3),
    )
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def gradient_of_last(count):
        return torch.autograd.grad(cross_entropy(model(images[-count:]), labels[-count:]), model.weight)[0]

    whole, last, older = gradient_of_last(12), gradient_of_last(12 // parts), gradient_of_last(5)
    seen, passes, sizes = [], [], []
    model.weight.grad, optimizer = older.clone(), torch.optim.SGD(model.parameters(), lr=0.1)
    # it may change later
    optimizer.register_step_pre_hook(lambda *_: seen.append(copy.deepcopy(model.weight.grad)))
    model.weight.register_hook(lambda _: passes.append(1))
    model.register_forward_hook(lambda layer, inputs, outputs: sizes.append(len(inputs[0])))
    accumulate(model, optimizer, cross_entropy, images, labels, parts)

    def is_like(gradient):
        return torch.allclose(seen[0], gradient, rtol=0.01, atol=1e-6)

    when = f"With {parts} parts the gradient is"
    assert sizes == parts * [12 // parts], f"With {parts} parts of 12 images the model saw {sizes} images."
    assert len(seen) == 1, f"The optimizer made {len(seen)} steps for one batch of {parts} parts."
    assert seen[0] is not None, "When the optimizer steps, the gradients are gone."
    assert not is_like(parts * whole), f"{when} {parts} times that of the whole batch, once for each part."
    only_last = f"Only the gradient of the last of {parts} parts is left when the optimizer steps."
    assert not is_like(last) and not is_like(last / parts), only_last
    assert not is_like(whole + older), f"{when} too large: an older one was still in .grad."
    assert is_like(whole), f"{when} not that of the whole batch."
    kept = f"{parts} parts went through {len(passes)} backward pass together: until then all activations were kept."
    assert len(passes) >= parts, kept

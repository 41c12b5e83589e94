"""How many times the right gradient a computed one is: what the checks of several notebooks ask."""

MISSING = "missing"  # stands for the ratio of a gradient that was never computed


def ratio(gradient, right):
    """Return how many times the right gradient this one is; None if it has another direction."""
    times = (gradient * right).sum() / right.square().sum()
    return times.item() if (gradient - times * right).norm() < 1e-3 * right.norm() else None


def ratio_of_all(gradients, right):
    """Return the one ratio of several gradients together; `MISSING` where one of them is None."""
    import torch

    if any(gradient is None for gradient in gradients):
        return MISSING
    return ratio(*(torch.cat([gradient.flatten() for gradient in group]) for group in (gradients, right)))


def ratios(layers, right) -> dict:
    """Return the ratio of each parameter's gradient, or `MISSING`, by the names of `layers`, a module."""
    pairs = zip(layers.named_parameters(), right, strict=True)
    return {name: ratio_of_all([parameter.grad], [gradient]) for (name, parameter), gradient in pairs}

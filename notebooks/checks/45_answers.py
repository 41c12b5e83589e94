"""Check of notebook 45: weights that go back to the model they came from."""

import torch

HEADS, SIZE = 2, 3
NAMES = {"tok.": "embed.tok.", "pos.": "embed.pos.", "layers.": "blocks.", "ln.": "norm.", "out.": "head."}
LAYER = {"ln1": (6,), "ln2": (6,), "qkv": (18, 6), "proj": (6, 6), "fc1": (24, 6), "fc2": (6, 24)}


def check_45_2(for_poet):
    theirs = of_poet()
    names = {
        name: next(new + name[len(old) :] for old, new in NAMES.items() if name.startswith(old))
        for name in theirs
    }
    ours = {names[name]: by_head(tensor) if ".qkv." in name else tensor for name, tensor in theirs.items()}
    kept = {name: tensor.clone() for name, tensor in ours.items()}
    given = for_poet(ours, HEADS)
    assert isinstance(given, dict), "It returns no dict of weights."
    unknown, missing = sorted(given.keys() - theirs.keys()), sorted(theirs.keys() - given.keys())
    assert not unknown, f"poet.py has no {', '.join(unknown[:3])}."
    assert not missing, f"poet.py also needs {', '.join(missing[:3])}."
    for name, right in theirs.items():
        require(name, given[name], right, kept[names[name]])
    same = ours.keys() == kept.keys() and all(torch.equal(ours[name], kept[name]) for name in kept)
    assert same, (
        "Your own model's state_dict isn't what it was: return a new dict, with new tensors where they change."
    )


def of_poet() -> dict:
    """Return weights with the names and shapes of a Poet of two layers, each number another."""
    shapes = {
        "tok.weight": (9, 6),
        "pos.weight": (4, 6),
        "ln.weight": (6,),
        "ln.bias": (6,),
        "out.weight": (9, 6),
    }
    for number in range(2):
        for name, shape in LAYER.items():
            shapes |= {f"layers.{number}.{name}.weight": shape, f"layers.{number}.{name}.bias": shape[:1]}
    return {
        name: torch.rand(shape, generator=torch.Generator().manual_seed(n))
        for n, (name, shape) in enumerate(shapes.items())
    }


def by_head(tensor):
    """Return the rows of qkv head by head."""
    return tensor.unflatten(0, (3, HEADS, SIZE)).transpose(0, 1).flatten(0, 2)


def require(name, given, right, ours):
    """Require one tensor, and say which order its rows have if it's not the stranger's."""
    assert given.shape == right.shape, (
        f"{name} has the shape {tuple(given.shape)}, not {tuple(right.shape)}."
    )
    if ".qkv." in name:
        assert not torch.equal(given, ours), (
            f"The rows of {name} are still head by head, and poet.py takes the first third of them as queries."
        )
        assert not torch.equal(given, by_head(ours)), (
            f"The rows of {name} went through the order of step 4 a second time. Which order leads back?"
        )
    assert torch.equal(given, right), f"{name} has other numbers than the stranger's."

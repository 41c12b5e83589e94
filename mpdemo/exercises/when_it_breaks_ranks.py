"""What a rank runs to check the programs of notebooks/10_when_it_breaks.ipynb; the checks are in when_it_breaks.py."""

import argparse
import copy
from pathlib import Path

from mpdemo.exercises.rank import folder

RATE = 0.1
BATCHES = (3, 5)  # of rank 0 and of rank 1


def drive_order(program, rank, world_size):
    """Call the reader's `finish`: the losses are 1 and 2, and rank 0 knows the best one, 0.25."""
    values = program.finish(1.0 + rank, (0.25, 9.0)[rank], rank, world_size)
    return [round(float(value), 4) for value in values]


def drive_uneven(program, rank, world_size):
    """Let the reader's `train` train on 3 batches on rank 0 and on 5 on rank 1; return batches, weights."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(rank)
    batches, model, seen = [torch.randn(4, 2) for _ in range(BATCHES[rank])], nn.Linear(2, 1), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    ddp = DistributedDataParallel(model)
    program.train(ddp, torch.optim.SGD(ddp.parameters(), lr=RATE), batches)
    used = sum(any(torch.equal(batch, one) for one in seen) for batch in batches)
    return {"used": used, "weights": [round(number, 5) for number in model.weight.flatten().tolist()]}


def two_heads():
    """Return a model with a trunk and two heads, of which a forward pass uses one: ``model(inputs, 1)``."""
    import torch
    from torch import nn

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

        def forward(self, inputs, head):
            return self.heads[head](torch.tanh(self.trunk(inputs)))

    torch.manual_seed(0)
    return TwoHeads()


def drive_heads(program, rank, world_size):
    """Train three steps with the reader's wrapper, head 0, 1, 0; return whether each step had the right gradients."""
    import torch

    model = two_heads()
    reference, wrapped = copy.deepcopy(model), program.wrap(model)
    inputs, right = torch.randn(8, 3), []
    for head in (0, 1, 0):
        model.zero_grad()
        reference.zero_grad()
        reference(inputs, head).square().mean().backward()
        wrapped(inputs[rank::world_size], head).square().mean().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        right.append(all(_close(own.grad, wanted.grad) for own, wanted in pairs))
    return right


def _close(own, wanted) -> bool:
    """Whether two gradients are equal up to rounding; none is a gradient of zeros."""
    import torch

    own, wanted = (torch.zeros(1) if gradient is None else gradient for gradient in (own, wanted))
    return torch.allclose(own, wanted.expand_as(own) if wanted.numel() == 1 else wanted, atol=1e-6)


def drive_norm(program, rank, world_size):
    """Wrap what the reader's `repair` returns; compare its gradients with those of one device."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
    images = torch.randn(8, 1, 6, 6)
    first = model[0].weight.clone()
    repaired = program.repair(model)
    reference = copy.deepcopy(repaired)
    reference(images).square().mean().backward()
    ddp = DistributedDataParallel(repaired)
    ddp(images[rank::world_size]).square().mean().backward()
    pairs = zip(repaired.parameters(), reference.parameters(), strict=True)
    names = [type(module).__name__ for module in repaired.modules()]
    return {
        "equal": all(torch.allclose(own.grad, wanted.grad, atol=1e-5) for own, wanted in pairs),
        "batch": any("BatchNorm" in name for name in names),
        "norm": any("Norm" in name for name in names),
        "training": repaired.training,
        "weights": torch.equal(repaired[0].weight, first),
    }


class Intruder:
    """An object whose pickle calls a function when it is loaded: here one that only leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return leave_a_file, (self.path,)


def leave_a_file(path):
    """Show that a loaded file could run anything."""
    Path(path).touch()


def drive_load(program, rank, world_size):
    """Let the reader's `load` read a good file, and one that calls a function."""
    import torch

    place = folder()
    torch.save({"weight": torch.ones(2), "options": argparse.Namespace(lr=0.5)}, place / "good.pt")
    torch.save({"weight": torch.ones(2), "options": Intruder(str(place / "ran"))}, place / "bad.pt")
    try:
        state = program.load(place / "good.pt")
        good = state["weight"].tolist() == [1, 1] and state["options"].lr == 0.5
        error = ""
    except Exception as caught:  # the reader's program may fail in any way
        good, error = False, f"{type(caught).__name__}: {str(caught).partition('. ')[0][:80]}"
    try:
        program.load(place / "bad.pt")
        refused = False
    except Exception:
        refused = True
    return {"good": good, "error": error, "refused": refused, "ran": (place / "ran").exists()}

"""What a rank runs to check the programs of notebooks/04_model_parallel.ipynb; the checks are in model_parallel.py."""

from contextlib import nullcontext

from mpdemo.exercises.gradients import ratios
from mpdemo.exercises.watch import watch

SHAPES = (6, 4), (4, 4), (4, 3)  # of the linear layers of a toy in three stages


def gradients(model) -> list:
    """Return the gradients of a model, and clear them."""
    values = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return values


def drive_moves(program, rank, world_size):
    """Call the reader's `train_step` on two devices of fake tensors, then with real ones; return what came of it."""
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.functional import cross_entropy

    def call(devices, mode):
        torch.manual_seed(0)
        with mode:
            stages = [nn.Linear(*shape, device=device) for shape, device in zip(SHAPES[::2], devices, strict=True)]
            batch = torch.randn(8, 6, device=devices[0]), torch.zeros(8, dtype=torch.long, device=devices[0])
            loss = program.train_step(*stages, [torch.device(device) for device in devices], *batch)
            return nn.ModuleDict(dict(zip(("first", "second"), stages, strict=True))), batch, loss

    result = {"error": "", "moved": "", "device": "", "ratios": {}}
    try:
        model, _, loss = call(("cpu:0", "cpu:1"), FakeTensorMode())
    except RuntimeError as error:
        return result | {"error": str(error).splitlines()[0].rstrip(".!")}
    for name, device in (("first", "cpu:0"), ("second", "cpu:1")):
        result["moved"] = result["moved"] or ("" if str(model[name].weight.device) == device else name)
    result["device"] = str(loss.device) if isinstance(loss, torch.Tensor) else ""
    model, (images, labels), _ = call(("cpu", "cpu"), nullcontext())
    computed = gradients(model)
    cross_entropy(model["second"](model["first"](images).relu()), labels).backward()
    right = gradients(model)
    for parameter, gradient in zip(model.parameters(), computed, strict=True):
        parameter.grad = gradient
    return result | {"ratios": ratios(model, right)}


def drive_step(program, rank, world_size):
    """Call the reader's `train_step` with a stage of two linear layers; images on rank 0, labels on rank 1."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    images, labels = torch.randn(8, 6), torch.randint(0, 3, (8,))
    right_loss = cross_entropy(model(images), labels)
    right_loss.backward()
    right = gradients(model)
    stage, own = (model[:2], right[:2]) if rank == 0 else (model[2:], right[2:])
    sends = watch(("send", "isend"), program)
    loss = program.train_step(stage, images if rank == 0 else None, labels if rank == 1 else None, rank)
    loss = loss.item() if isinstance(loss, torch.Tensor) else None
    return {
        "loss": loss,
        "right_loss": right_loss.item(),
        "sent": [shape for _, shape in sends],
        "ratios": ratios(stage, own),
    }


def drive_chain(program, rank, world_size):
    """Call the reader's `train_step` with one of three stages, of which the last one computes a loss."""
    import torch
    from torch import nn

    class Loss(nn.Module):
        def forward(self, outputs):
            return outputs.square().mean()

    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(*shape), nn.ReLU()) for shape in SHAPES[:-1]]
    stages.append(nn.Sequential(nn.Linear(*SHAPES[-1]), Loss()))
    model, images = nn.Sequential(*stages), torch.randn(8, 6)
    model(images).backward()
    right = gradients(model[rank])
    program.train_step(model[rank], images if rank == 0 else None, rank, world_size)
    return ratios(model[rank], right)


def drive_loader(program, rank, world_size):
    """Return the batches of two epochs of the reader's `loader`, over 12 images that are their own numbers.

    The ranks' random states differ, as those of stages do whose dropout draws other numbers of them.
    """
    import torch

    torch.manual_seed(100 + rank)
    loader = program.loader(list(range(12)), 4, rank, world_size)
    batches = []
    for _ in range(2):
        torch.rand(1 + rank)
        batches += [[int(image) for image in batch] for batch in loader]
    return batches

"""What a rank runs to check the programs of notebooks/03_ddp.ipynb; the checks are in ddp.py."""

import copy
import math
import os
import time

from mpdemo.exercises.gradients import ratio
from mpdemo.exercises.rank import folder
from mpdemo.exercises.watch import COLLECTIVES, watch


def drive_mean(program, rank, world_size):
    """Call the reader's `mean`; return its value, the collectives that it used, and how many tensors it sent."""
    import torch

    calls, sends = watch(COLLECTIVES, program), watch(("send", "isend"), program)
    value = program.mean(torch.tensor([1.0 + 3 * rank**2, 10.0]), rank, world_size)
    value = [round(number, 2) for number in value.tolist()] if isinstance(value, torch.Tensor) else None
    return {"value": value, "collectives": [name for name, _ in calls], "sent": len(sends)}


def drive_report(program, rank, world_size):
    """Call the reader's `report` with a loss of 1 on rank 0 and 2 on rank 1."""
    calls = watch(COLLECTIVES, program)
    value = program.report(1.0 + rank, rank, world_size)
    barrier_by_store(rank, world_size)
    return {"value": None if value is None else float(value), "reduced": bool(calls)}


def barrier_by_store(rank, world_size):
    """Wait for the other ranks without a collective: it would be taken for the one that a reader's program lacks."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"arrived{rank}", "1")
    store.wait([f"arrived{other}" for other in range(world_size)])


def drive_ring(program, rank, world_size):
    """Call the reader's `reduce_scatter`; rank r's numbers are 4 ** r times (1, 100, 10000) in chunk 0, 1, 2."""
    import torch

    calls, sends = watch(COLLECTIVES, program), watch(("send", "isend"), program)
    chunks = [torch.full((2,), float(4**rank * 100**number)) for number in range(world_size)]
    number = program.reduce_scatter(chunks, rank, world_size)
    if number not in range(world_size):
        return {"number": number if isinstance(number, int) else f"a {type(number).__name__}", "collectives": []}
    value = round(chunks[number][0].item() / 100**number)
    times = [value // 4**other % 4 for other in range(world_size)]
    return {
        "number": number,
        "missing": [other for other, count in enumerate(times) if count == 0],
        "double": [other for other, count in enumerate(times) if count > 1],
        "right": value == sum(4**other for other in range(world_size)),
        "sent": sum(math.prod(shape) for _, shape in sends) / 2,
        "collectives": [name for name, _ in calls],
    }


def share_and_model(rank):
    """Return a small model, this rank's share of twelve inputs with labels, and the gradients of all twelve."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    inputs, labels = torch.randn(12, 5), torch.randint(0, 3, (12,))
    whole = copy.deepcopy(model)
    nn.functional.cross_entropy(whole(inputs), labels).backward()
    right = {name: parameter.grad for name, parameter in whole.named_parameters()}
    return model, (inputs[rank::2], labels[rank::2]), right


def drive_average(program, rank, world_size):
    """Compute the gradients of a share, call the reader's `average_gradients`; return the ratios to the right ones."""
    from torch.nn.functional import cross_entropy

    model, (inputs, labels), right = share_and_model(rank)
    cross_entropy(model(inputs), labels).backward()
    program.average_gradients(model, world_size)
    return {name: ratio(parameter.grad, right[name]) for name, parameter in model.named_parameters()}


def drive_accumulate(program, rank, world_size):
    """Call the reader's `accumulate` on three parts; return the number of all-reduces, and what the gradients are."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, (inputs, labels), right = share_and_model(rank)
    ddp, calls = DistributedDataParallel(model), []

    def note(state, bucket):
        calls.append(1)
        return (
            dist.all_reduce(bucket.buffer().div_(world_size), async_op=True).get_future().then(lambda f: f.value()[0])
        )

    ddp.register_comm_hook(None, note)
    program.accumulate(ddp, list(zip(inputs.chunk(3), labels.chunk(3), strict=True)))
    missing = [parameter for parameter in model.parameters() if parameter.grad is None]
    gradient = torch.zeros(1) if missing else torch.cat([p.grad.flatten() for p in model.parameters()])
    both = [torch.empty_like(gradient) for _ in range(world_size)]
    dist.all_gather(both, gradient)
    reference = torch.cat([tensor.flatten() for tensor in right.values()])
    times = 0.0 if missing else (gradient @ reference / (reference @ reference)).item()
    return {"calls": len(calls), "equal": torch.allclose(*both, atol=1e-6), "ratio": times}


def drive_batches(program, rank, world_size):
    """Return the batches of two epochs of twelve images that the reader's `batches` yields on this rank."""
    return [[int(image) for image in batch] for batch in program.batches(list(range(12)), 4, 2)]


def drive_loss(program, rank, world_size):
    """Call the reader's `mean_loss`: 3 images with the sum 3 on rank 0, 5 with the sum 13 on rank 1."""
    value = program.mean_loss((3.0, 13.0)[rank], (3, 5)[rank])
    return None if value is None else float(value)


def drive_save(program, rank, world_size):
    """Call the reader's `save` while writing takes half a second; return who saved, what, and who went on too early."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    path = str(folder() / "model.pt")
    written, save = [], torch.save

    def slow_save(state, file, *args, **kwargs):
        time.sleep(0.5)
        save(state, file, *args, **kwargs)
        written.append(state)

    torch.save = slow_save
    program.save(DistributedDataParallel(nn.Linear(2, 1)), path, rank)
    there = os.path.exists(path)
    barrier_by_store(rank, world_size)
    keys = list(written[0]) if written and isinstance(written[0], dict) else []
    return {"saved": len(written), "keys": keys, "there": there}


def drive_training(program, rank, world_size):
    """Call the reader's `train` with a model that differs between the ranks, and 24 inputs whose first number counts.

    Return the numbers of the inputs in each batch of this rank, and how far its weights are from those of one device
    that starts like rank 0 and takes the batches of all ranks together.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import TensorDataset

    inputs, labels = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
    inputs[:, 0] = torch.arange(24) / 24
    torch.manual_seed(rank)
    model, batches = nn.Linear(5, 3), []
    single = copy.deepcopy(model)
    model.register_forward_pre_hook(lambda _, taken: batches.append((24 * taken[0][:, 0]).round().int().tolist()))
    program.train(model, TensorDataset(inputs, labels), 2, 8)
    of_all = [None] * world_size
    dist.all_gather_object(of_all, batches)
    for parameter in single.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in zip(*of_all, strict=False):  # batches that only some ranks have are the check's concern
        step = sum(step, [])
        optimizer.zero_grad()
        nn.functional.cross_entropy(single(inputs[step]), labels[step]).backward()
        optimizer.step()
    return {"batches": batches, "apart": (single.weight - model.weight).abs().max().item()}

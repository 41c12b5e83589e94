"""What a rank runs to check the programs of notebooks/05_pipeline.ipynb; the checks are in pipeline.py."""

from mpdemo.exercises.gradients import ratio_of_all

MICROBATCHES = 3


def first_stage(stage, images, microbatches):
    """Do the part of rank 0 in one step with GPipe: send every microbatch, then receive every gradient."""
    import torch
    import torch.distributed as dist

    outputs = [stage(part) for part in images.chunk(microbatches)]
    for output in outputs:
        dist.send(output.detach(), 1)
    for output in outputs:
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)


def two_stages():
    """Return two stages, 12 images and their labels, the same in every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    stages = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3)
    return *stages, torch.randn(12, 4), torch.randint(0, 3, (12,))


def whole_batch(number) -> list:
    """Return the gradients of one of the two stages, of the whole batch at once."""
    import torch

    first, second, images, labels = two_stages()
    torch.nn.functional.cross_entropy(second(first(images)), labels).backward()
    return [parameter.grad for parameter in (first, second)[number].parameters()]


def drive_stages(program, rank, world_size):
    """Run one step, on rank 1 by the reader's `last_stage`; return the factor to the gradients of the whole batch."""
    first, second, images, labels = two_stages()
    if rank == 0:
        first_stage(first, images, MICROBATCHES)
    else:
        program.last_stage(second, labels, MICROBATCHES)
    return ratio_of_all([parameter.grad for parameter in (first, second)[rank].parameters()], whole_batch(rank))

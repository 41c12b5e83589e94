"""What the process-a-device forms of a cut model share: shapes between stages, a timeline, a plain forward walk."""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mpdemo.timeline.record import Recorder


def stage_examples(model, points, settings) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Shapes and types at every cut, found without computing anything.

    Parameters
    ----------
    model : Blocks
        Uncut.
    points : list of int
        Where it is cut.
    settings : Settings
        Gives the microbatch's size, ``batch_size / microbatches``.

    Returns
    -------
    list of (input, output)
        Empty tensors (device "meta") a stage, of one microbatch.
    """
    size = settings.batch_size // settings.microbatches
    shapes = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(size, *model.input_shape)
        for stage in model.cut(points):
            y = stage(x)
            shapes.append((x, y))
            x = y
    return [tuple(_empty_like(t, needs_grad=t is not shapes[0][0]) for t in pair) for pair in shapes]


def _empty_like(tensor, needs_grad):
    """Shape and type of a tensor, without its memory; the library must know where gradients come back."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=needs_grad)


def quiet_greeting(pipeline_stages, device):
    """Leave out the greeting between neighbours with which PyTorch 2.11 opens its channels.

    gloo needs none, and cannot send to itself, as the two stages of one rank at the foot of ZBV's V would.
    """
    for stage in pipeline_stages:
        if device.type == "cpu" and hasattr(stage, "_get_init_p2p_neighbors_ops"):
            stage._get_init_p2p_neighbors_ops = list


def recorder_for(settings, world, pipeline_stages):
    """Return a recorder attached to this rank's stages where the settings ask for a timeline, else None."""
    if not settings.timeline:
        return None
    recorder = Recorder(world.rank, world.device)
    for stage in pipeline_stages:
        recorder.attach(stage)
    return recorder


def walk(stages, owners, examples, images):
    """Send a batch of any size through all stages, forward only.

    Parameters
    ----------
    stages : list of Blocks
        Those of this rank, in order.
    owners : list of int
        The rank that holds each stage of the whole model.
    examples : list of (input, output)
        From `stage_examples`; all but the batch dimension is used.
    images : torch.Tensor
        (B, C, S, S), or (B, 0) on ranks that do not take images.

    Returns
    -------
    torch.Tensor or None
        (B, classes) on the rank that holds the last stage.
    """
    rank, mine = dist.get_rank(), iter(stages)
    x = images
    for index, owner in enumerate(owners):
        if owner != rank:
            continue
        if index > 0 and owners[index - 1] != rank:
            example = examples[index][0]
            x = torch.empty(len(images), *example.shape[1:], dtype=example.dtype, device=images.device)
            dist.recv(x, owners[index - 1])
        x = next(mine)(x)
        if index + 1 < len(owners) and owners[index + 1] != rank:
            dist.send(x.contiguous(), owners[index + 1])
    return x if owners[-1] == rank else None

"""What the per-device forms of a cut model share: this rank's stages, the shapes between stages, a timeline."""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.func import functional_call

from mpdemo.models import resolve_cut
from mpdemo.parallel.rung import Rung
from mpdemo.timeline.record import Recorder

SCHEDULE_CLASSES = {
    "naive": pipelining.ScheduleGPipe,  # with one microbatch
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class CutOverProcesses(Rung):
    """One process per device: each holds one stage or more, and sends to its neighbours.

    Parameters
    ----------
    model, world, settings
        As for every rung.
    owners : list of int
        The number, within the group, of the process that holds each stage of the whole model.

    Attributes
    ----------
    group : ProcessGroup or None
        The processes over which the model is cut, where these are not all.
    owners : list of int
        The rank that holds each stage, counted over all processes.
    """

    group = None

    def __init__(self, model, world, settings, owners):
        super().__init__(world, settings)
        ranks = dist.get_process_group_ranks(self.group)
        self.owners = owners = [ranks[number] for number in owners]
        points = resolve_cut(model.names, settings.cut, len(owners))
        self.shapes = stage_shapes(model, points, settings, self.device)
        self.stages = [model.cut(points)[i].to(self.device) for i, rank in enumerate(owners) if rank == self.rank]
        self.has_input, self.has_output = self.rank == owners[0], self.rank == owners[-1]
        self.recorder = Recorder(world.rank, world.device) if settings.timeline else None

    def forward(self, images):
        """Send a batch of any size, (B, 0) on ranks that take no images, through all stages. See `Rung.forward`."""
        own_stages, x = iter(self.stages), images
        for number, owner in enumerate(self.owners):
            if owner != self.rank:
                continue
            if number > 0 and self.owners[number - 1] != self.rank:
                like = self.shapes[number][0]  # all but the batch dimension
                x = receive(like.new_empty(len(images), *like.shape[1:]), self.owners[number - 1], self.device)
            x = next(own_stages)(x)
            if number + 1 < len(self.owners) and self.owners[number + 1] != self.rank:
                dist.send(x.contiguous(), self.owners[number + 1])
        return x if self.has_output else None


def stage_shapes(model, points, settings, device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Find shapes and types at every cut, without computing anything.

    Under autocast the types depend on the device: a GPU gives the outputs of group norm in float32, a CPU in bf16.

    Parameters
    ----------
    model : Blocks
        Uncut.
    points : list of int
        Where it is cut.
    settings : Settings
        Give the microbatch's size: a replica's share of the batch, divided by `microbatches`.
    device : torch.device
        Where the stages will compute.

    Returns
    -------
    list of (input, output)
        One pair of empty tensors (device "meta") per stage, for one microbatch.
    """
    shapes = []
    model.eval()  # in training, batch norm would count this as a batch
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        share = settings.batch_size // (settings.replicas or 1)
        size = (share // settings.microbatches, *model.input_shape)
        outputs = torch.empty(size, device=device)
        for number, stage in enumerate(model.cut(points)):
            tensors = [*stage.named_parameters(), *stage.named_buffers()]
            tensors = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors}
            inputs, outputs = outputs, functional_call(stage, tensors, (outputs,))
            shapes.append((_without_memory(inputs, number > 0), _without_memory(outputs, True)))
    model.train()
    return shapes


def _without_memory(tensor, needs_gradient):
    """Shape and type of a tensor; the library must know where gradients come back."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=needs_gradient)


def pipeline_stages(rung, loss_fn):
    """Wrap a rank's stages for ``torch.distributed.pipelining``, and record them where a timeline is wanted.

    Returns
    -------
    stages : PipelineStage or list of PipelineStage
        A list where the rank holds several, as the library's schedules expect it.
    loss_fn : callable
    """
    numbers = [number for number, owner in enumerate(rung.owners) if owner == rung.rank]
    wrapped = [
        pipelining.PipelineStage(stage, number, len(rung.owners), rung.device, *rung.shapes[number], group=rung.group)
        for stage, number in zip(rung.stages, numbers, strict=True)
    ]
    for stage in wrapped:
        # PyTorch 2.11 opens its channels with a handshake between neighbours. gloo needs none, and cannot send to
        # itself, as the two stages of one rank at the foot of ZBV's V would.
        if rung.device.type == "cpu" and hasattr(stage, "_get_init_p2p_neighbors_ops"):
            stage._get_init_p2p_neighbors_ops = list
        if rung.recorder:
            rung.recorder.attach(stage)
    loss_fn = rung.recorder.loss(loss_fn) if rung.recorder else loss_fn
    return (wrapped if len(wrapped) > 1 else wrapped[0]), loss_fn


def average_gradients(parameters, group):
    """Replace each gradient by its mean over the processes of a group, which all hold the same parameters.

    All gradients travel in one message: sent one by one, small tensors would wait for the network many times.
    """
    gradients = [parameter.grad for parameter in parameters]
    message = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(message, group=group)
    message /= dist.get_world_size(group)
    for gradient, mean in zip(gradients, message.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def receive(like, rank, device):
    """Receive a tensor of the shape and type of `like` from a rank, into memory on this process's device."""
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    dist.recv(tensor, rank)
    return tensor

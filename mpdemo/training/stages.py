"""A model cut over processes: which layers this process holds, the shapes in between, and a validation through all.

Taught in notebooks/30_two_stages.ipynb and 31_microbatches.ipynb.
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call

from mpdemo.models.private_torch import FakeTensors, skip_handshake
from mpdemo.settings.cuts import resolve_cut
from mpdemo.settings.schedules import placement


class LocalStages:
    """The stages of a cut model that this process holds: `stages` by number, and `model`, all their layers.

    Of the whole model it knows the rank of each stage (`owners`), and input and output of each for one microbatch
    (`shapes`, tensors without memory). The `first` process takes the images in, the `last` one computes the loss.
    """

    recorder = None  # a `Recorder`, where the settings ask for a timeline

    def __init__(self, model, settings, rank, device, group, schedule):
        ranks = dist.get_process_group_ranks(group)
        self.rank, self.device, self.group = rank, device, group
        self.owners = [ranks[number] for number in placement(schedule, len(ranks))]
        points = resolve_cut(model.names, settings.cut, len(self.owners))
        self.shapes = stage_shapes(model, points, settings, device)
        cut = enumerate(model.cut(points))
        self.stages = {number: stage.to(device) for number, stage in cut if self.owners[number] == rank}
        self.model = model.some([name for stage in self.stages.values() for name in stage.names])
        self.first = rank == self.owners[0]
        self.last = rank == self.owners[-1]

    def pipeline_stages(self):
        """Return this process's stages for `torch.distributed.pipelining`: one, or a list where it holds several."""
        stages = []
        for number, layers in self.stages.items():
            shapes = self.shapes[number]
            stage = PipelineStage(layers, number, len(self.owners), self.device, *shapes, group=self.group)
            if self.device.type == "cpu":
                skip_handshake(stage)
            if self.recorder:
                self.recorder.attach(stage)
            stages.append(stage)
        return stages if len(stages) > 1 else stages[0]

    def shardable(self) -> list:
        """Return what FSDP divides, in order: every block of a stage, then the stage, which starts and ends a pass."""
        return [module for stage in self.stages.values() for module in (*stage.blocks(), stage)]

    def forward(self, images):
        """Send a batch of any size through all stages; return the outputs where this process has them, else None."""
        x = images
        for number, stage in self.stages.items():
            if number > 0 and self.owners[number - 1] != self.rank:
                like = self.shapes[number][0]  # all but the batch dimension
                x = receive(
                    like.new_empty(len(images), *like.shape[1:]), self.owners[number - 1], self.device
                )
            x = stage(x)
            if number + 1 < len(self.owners) and self.owners[number + 1] != self.rank:
                dist.send(x.contiguous(), self.owners[number + 1])
        return x if self.last else None


def receive(like, rank, device):
    """Receive a tensor of the shape and type of `like` from a rank, into memory on this process's device."""
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    dist.recv(tensor, rank)
    return tensor


def stage_shapes(model, points, settings, device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Find shapes and types of a microbatch at every cut, without computing."""
    shapes = []
    model.eval()  # in training, batch norm would count this as a batch
    with FakeTensors(allow_non_fake_inputs=True), torch.no_grad():
        share = settings.batch_size // settings.replicas
        outputs = torch.empty(share // settings.microbatches, *model.input_shape, device=device)
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

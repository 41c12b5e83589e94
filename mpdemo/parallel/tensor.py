"""Tensor parallel: every process computes a part of every layer, all of them on the same images.

In a block's attention and in its two linear layers, the first layers are split by columns (each process computes some
of the outputs: some of the heads) and the second by rows (each adds up some of the inputs); the sums of all processes
are then added (all-reduce). So a block has two all-reduces forward, and four backward: the library adds up
the gradients of query, key and value one by one. The first and last block of the model are whole in every process. With
several replicas, each of which splits its layers, FSDP goes over these: a grid, as in the hybrid rung. Taught in
notebooks/07_sharding.ipynb. Sources: https://arxiv.org/abs/1909.08053, sequence parallelism
https://arxiv.org/abs/2205.05198, https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mpdemo.parallel.fsdp import shard
from mpdemo.parallel.rung import Rung, count_correct, loss_fn

WHOLE, TOKENS = Replicate(), Shard(1)  # how activations (B, T, D) lie: the same everywhere, or some tokens each


class Tensor(Rung):
    """A part of every layer in every process; all of a replica see the same images and compute the same loss."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.model = model.to(self.device)
        self.stages = [self.model]
        self.replicas = settings.replicas or 1
        grid = (self.replicas, settings.devices)  # neighbouring ranks split layers: they talk most
        mesh = init_device_mesh(self.device.type, grid, mesh_dim_names=("dp", "tp"))
        parallelize_module(self.model, mesh["tp"], split_tokens() if settings.sequence_parallel else split_layers())
        if self.replicas > 1:  # what a process holds of the layers is divided once more, over the replicas
            shard(self.model, mesh["dp"], "always")
        self.replica = mesh.get_local_rank("dp")
        self.has_output = mesh.get_local_rank("tp") == 0  # all of a replica have the same loss, and one reports it

    def step(self, images, labels):
        """Forward and backward of one microbatch after the other; gradients add up. See `Rung.step`."""
        total, correct = 0, 0
        *earlier, last = self.split(images, labels)
        for part, target in (*earlier, last):
            if self.replicas > 1:
                self.model.set_requires_gradient_sync(part is last[0])  # as in FSDP
            outputs = self.model(part)
            loss = loss_fn(outputs, target) / self.microbatches  # the parts' sum is the mean
            self.scaler.scale(loss).backward()  # adds to parameter.grad
            total, correct = total + loss.detach(), correct + count_correct(outputs, target)
        add_up_gradients(self.named_parameters().values())
        return (total, correct) if self.has_output else self.no_result()

    @property
    def saves(self):
        """See `Rung.saves`."""
        return self.rank == 0


def split_layers() -> dict:
    """Which layers are split, and how: module's name, of every block -> style."""
    return {
        **{f"block.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "block.*.attention.out": RowwiseParallel(),  # adds up what the heads of all processes give
        "block.*.mlp.up": ColwiseParallel(),
        "block.*.mlp.down": RowwiseParallel(),
    }


def split_tokens() -> dict:
    """As `split_layers`, and between these layers each process has some of the tokens (sequence parallelism).

    An all-reduce becomes a reduce-scatter, and an all-gather before the next layer: as many bytes, and what lies
    between (layer norms, sums) needs a part of the memory and of the work.
    """
    gather = PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=WHOLE)
    return {
        **split_layers(),
        "embed": PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=TOKENS),
        **{f"block.*.{name}": SequenceParallel() for name in ("norm1", "norm2")},
        **{f"block.*.{name}": gather for name in ("attention", "mlp")},
        **{f"block.*.{name}": RowwiseParallel(output_layouts=TOKENS) for name in ("attention.out", "mlp.down")},
        "head": PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=WHOLE, use_local_output=True),
    }


def add_up_gradients(parameters):
    """Add up over the processes the gradients of layers that saw some of the tokens: the norms', which are whole."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

"""Tensor parallel: every process computes a part of every layer, all of them on the same images.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.tensor --model transformer --sequence-parallel

The first layers of a block are split by columns (some heads each), the second by rows, and the processes' sums are
added: an all-reduce. Taught in notebooks/08_inside_a_layer.ipynb. Sources: https://arxiv.org/abs/1909.08053, 2205.05198.
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score

WHOLE, TOKENS = Replicate(), Shard(1)  # activations (B, T, D): the same everywhere, or some tokens each
COLUMNS, ROWS = tp.ColwiseParallel(), tp.RowwiseParallel()
LAYERS = {f"block.*.attention.{name}": COLUMNS for name in ("query", "key", "value")}
SHARED = {"input_layouts": WHOLE, "desired_input_layouts": WHOLE}  # one all-reduce for three gradients
LAYERS |= {"block.*.attention": tp.PrepareModuleInput(**SHARED)}
LAYERS |= {"block.*.mlp.up": COLUMNS, "block.*.attention.out": ROWS, "block.*.mlp.down": ROWS}
GATHER, SCATTER = {"input_layouts": TOKENS, "desired_input_layouts": WHOLE}, {"output_layouts": TOKENS}
SEQUENCES = {  # between these layers each process has some of the tokens: sequence parallelism
    "embed": tp.PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=TOKENS),
    **{f"block.*.{name}": tp.SequenceParallel() for name in ("norm1", "norm2")},
    **{f"block.*.{name}": tp.PrepareModuleInput(**GATHER) for name in ("attention", "mlp")},
    **{f"block.*.{name}": tp.RowwiseParallel(**SCATTER) for name in ("attention.out", "mlp.down")},
    "head": tp.PrepareModuleInput(**GATHER, use_local_output=True),
}


def build(run):
    model, replicas = run.model().to(run.device), run.s.replicas or 1
    mesh = init_device_mesh(run.device.type, (replicas, run.s.devices), mesh_dim_names=("dp", "tp"))
    tp.parallelize_module(model, mesh["tp"], LAYERS | (SEQUENCES if run.s.sequence_parallel else {}))
    for module in [*model.blocks(), model] if replicas > 1 else []:  # sharded over dp as well
        fully_shard(module, mesh=mesh["dp"], mp_policy=run.policy())
    first = mesh.get_local_rank("tp") == 0
    optimizer = run.optimizer(model.parameters(), foreach=False)  # one by one: some are DTensors

    def step(images, labels):
        optimizer.zero_grad()
        parts = run.split(images, labels)  # one part, unless --microbatches asks for more
        total = 0
        for part, target in parts:
            if replicas > 1:
                model.set_requires_gradient_sync(part is parts[-1][0])  # as in FSDP
            outputs = model(part)
            loss = cross_entropy(outputs, target) / len(parts)  # the parts' losses add up to the mean
            loss.backward()  # adds to parameter.grad
            total += score(loss, outputs, target)
        for parameter in model.parameters():  # norms are replicated but saw some tokens only: add up
            if isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        optimizer.step()
        return total if first else None  # the others have the same

    def evaluate(images):
        outputs = model(images)  # all processes together
        return outputs if first else None

    share = {"replicas": replicas, "replica": mesh.get_local_rank("dp"), "group": mesh.get_group("dp")}
    return Rung(model, optimizer, step, evaluate=evaluate, **share)


if __name__ == "__main__":
    main(__doc__, build)

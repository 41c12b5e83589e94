"""Tensor parallel: every process computes a part of every layer, all of them on the same images.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.tensor --model transformer

The first layers of a block are split by columns (some heads each), the second by rows, and the processes' sums are
added: an all-reduce. Taught in notebooks/44_split_a_layer.ipynb. Source: https://arxiv.org/abs/1909.08053.
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score

WHOLE = Replicate()  # activations (B, T, D) are the same everywhere
COLUMNS, ROWS = tp.ColwiseParallel(), tp.RowwiseParallel()
LAYERS = {f"block.*.attention.{name}": COLUMNS for name in ("query", "key", "value")}
SHARED = {"input_layouts": WHOLE, "desired_input_layouts": WHOLE}  # one all-reduce for three gradients
LAYERS |= {"block.*.attention": tp.PrepareModuleInput(**SHARED)}
LAYERS |= {"block.*.mlp.up": COLUMNS, "block.*.attention.out": ROWS, "block.*.mlp.down": ROWS}


def build(run):
    model = run.model().to(run.device)
    tp.parallelize_module(model, init_device_mesh(run.device.type, (run.world,)), LAYERS)
    optimizer = run.optimizer(model.parameters(), foreach=False)  # one by one: some are DTensors

    def step(images, labels):
        optimizer.zero_grad()
        parts = run.split(images, labels)  # one part, unless --microbatches asks for more
        total = 0
        for part, target in parts:
            outputs = model(part)
            loss = cross_entropy(outputs, target) / len(parts)  # the parts' losses add up to the mean
            loss.backward()  # adds to parameter.grad
            total += score(loss, outputs, target)
        optimizer.step()
        return total if run.rank == 0 else None  # the others have the same

    def evaluate(images):
        outputs = model(images)  # all processes together
        return outputs if run.rank == 0 else None

    return Rung(model, optimizer, step, evaluate=evaluate)


if __name__ == "__main__":
    main(__doc__, build)

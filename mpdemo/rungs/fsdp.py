"""Fully sharded data parallel: as DDP, but each process holds only its shard of the model.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.fsdp --model transformer --epochs 2

Taught in notebooks/41_fsdp.ipynb. Sources: https://arxiv.org/abs/1910.02054 (ZeRO), 2304.11277.
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score


def build(run):
    model = run.model()  # on the CPU: no device ever holds it whole, blocks move there one by one
    mesh = init_device_mesh(run.device.type, (run.world,))
    for module in [*model.blocks(), model]:  # each is gathered as one unit
        fully_shard(module, mesh=mesh)
    optimizer = run.optimizer(model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        parts = run.split(images, labels)  # one part, unless --microbatches asks for more
        total = 0
        for part, target in parts:
            model.set_requires_gradient_sync(part is parts[-1][0])  # after the last part
            outputs = model(part)  # gathers the weights of one block at a time
            loss = cross_entropy(outputs, target) / len(parts)  # the parts' losses add up to the mean
            loss.backward()  # gathers what was freed again, and reduce-scatters the gradients
            total += score(loss, outputs, target)
        optimizer.step()
        return total

    return Rung(model, optimizer, step, replicas=run.world, replica=run.rank)


if __name__ == "__main__":
    main(__doc__, build)

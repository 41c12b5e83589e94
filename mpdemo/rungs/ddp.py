"""Distributed data parallel: one process per device, each with the whole model and its share of the batch.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.ddp --model transformer --epochs 2

Taught in notebooks/21_ddp_by_hand.ipynb. Source: https://arxiv.org/abs/2006.15704.
"""

from contextlib import nullcontext

from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mpdemo.run import Rung, main, score


def build(run):
    model = run.model().to(run.device)
    static = run.s.microbatches == 1
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static)
    optimizer = run.optimizer(model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        parts = run.split(images, labels)  # one part, unless --microbatches asks for more
        total = 0
        for part, target in parts:
            with nullcontext() if part is parts[-1][0] else ddp.no_sync():
                outputs = ddp(part)  # only the last part's backward pass averages over all processes
            loss = cross_entropy(outputs, target) / len(parts)  # the parts' losses add up to the mean
            loss.backward()  # adds to parameter.grad
            total += score(loss, outputs, target)
        optimizer.step()
        return total

    return Rung(model, optimizer, step, replicas=run.world, replica=run.rank)


if __name__ == "__main__":
    main(__doc__, build)

"""Pipelined model parallelism: the batch is cut into microbatches, so that the stages work at the same time.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.pipeline --model transformer --schedule ZBVZeroBubble
    python -m mpdemo.rungs.pipeline --form one-process --devices 2 --microbatches 4 --model transformer

Taught in notebooks/31_microbatches.ipynb. Sources: GPipe https://arxiv.org/abs/1811.06965, 1F1B
https://arxiv.org/abs/1806.03377, interleaved https://arxiv.org/abs/2104.04473, ZBV https://arxiv.org/abs/2401.10241.
"""

import torch
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score


def per_device(run):
    local = run.local_stages()  # this process's layers, and the shapes in between
    make = get_schedule_class(run.s.schedule)
    schedule = make(local.pipeline_stages(), run.s.microbatches, loss_fn=cross_entropy)
    optimizer = run.optimizer(local.model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        losses = []
        inputs = (images,) if local.first else ()
        targets = {"target": labels, "losses": losses} if local.last else {}
        outputs = schedule.step(*inputs, **targets)  # all forward and backward passes, in order
        optimizer.step()
        return score(torch.stack(losses).mean(), outputs, labels) if local.last else None

    return Rung(local.model, optimizer, step, evaluate=local.forward, images=local.first)


def one_process(run):
    model = run.model()
    stages = [stage.to(device) for stage, device in zip(run.cut(model), run.devices, strict=True)]

    def forward(images):
        parts = list(images.chunk(run.s.microbatches))
        for tick in range(len(parts) + len(stages) - 1):  # stage s works on microbatch tick - s
            for s in reversed(range(len(stages))):  # later stages first, since their input is ready
                if 0 <= tick - s < len(parts):
                    parts[tick - s] = stages[s](parts[tick - s].to(run.devices[s], non_blocking=True))
        return torch.cat(parts)

    optimizer = run.optimizer(model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        outputs = forward(images)  # kernel launches return at once, so GPUs overlap; CPU cores do not
        loss = cross_entropy(outputs, labels.to(outputs.device))
        loss.backward()  # adds to parameter.grad
        optimizer.step()
        return score(loss, outputs, labels)

    return Rung(model, optimizer, step, evaluate=forward)


def build(run):
    return per_device(run) if run.s.form == "per-device" else one_process(run)


if __name__ == "__main__":
    main(__doc__, build)

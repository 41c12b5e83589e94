"""Naive model parallelism: the layers are divided over the devices, and one device is busy at a time.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.model_parallel --model transformer
    python -m mpdemo.rungs.model_parallel --form one-process --devices 2 --model transformer

It makes room for a model that fits no single device, and nothing faster. Taught in notebooks/30_two_stages.ipynb.
"""

import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score
from mpdemo.training.stages import receive


def per_device(run):
    local = run.local_stages()  # this process's layers, and the shapes in between
    optimizer = run.optimizer(local.model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        if not local.first:
            images = receive(local.shapes[run.rank][0], run.rank - 1, run.device).requires_grad_()
        outputs = local.model(images)
        if local.last:
            loss = cross_entropy(outputs, labels)
            loss.backward()
        else:
            dist.send(outputs.detach(), run.rank + 1)
            outputs.backward(receive(outputs, run.rank + 1, run.device))  # the gradient comes back
        if not local.first:
            dist.send(images.grad.contiguous(), run.rank - 1)
        optimizer.step()
        return score(loss, outputs, labels) if local.last else None

    return Rung(local.model, optimizer, step, evaluate=local.forward, images=local.first)


def one_process(run):
    model = run.model()
    stages = [stage.to(device) for stage, device in zip(run.cut(model), run.devices, strict=True)]

    def forward(images):
        for stage, device in zip(stages, run.devices, strict=True):
            images = stage(images.to(device, non_blocking=True))
        return images

    optimizer = run.optimizer(model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        outputs = forward(images)
        loss = cross_entropy(outputs, labels.to(outputs.device))  # where the outputs are
        loss.backward()  # adds to parameter.grad, on one device after the other
        optimizer.step()
        return score(loss, outputs, labels)

    return Rung(model, optimizer, step, evaluate=forward)


def build(run):
    return per_device(run) if run.s.form == "per-device" else one_process(run)


if __name__ == "__main__":
    main(__doc__, build)

"""Split a model that is no flat list: torch.distributed.pipelining traces it and splits it at a module.

    torchrun --standalone --nproc-per-node=2 split_any_model.py

The trace (torch.export) finds every tensor that crosses the split, skip connections too. It follows one
shape of input, and a forward pass that decides by the values of tensors cannot be traced.
It needs PyTorch 2.10 or newer."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torchvision.models import resnet18

if torch.__version__ < "2.10a0":  # a pipeline's return_outputs is new in it
    sys.exit(f"this script needs PyTorch 2.10 or newer, and this is {torch.__version__}")

STEPS, MICROBATCHES = 3, 2


def main():
    gpu = torch.accelerator.current_accelerator(check_available=True)  # None: on the CPU
    device = torch.device(gpu.type, int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = resnet18(num_classes=10)  # yours
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))  # yours
    microbatch = images.chunk(MICROBATCHES)[0]
    points = {"layer3": SplitPoint.BEGINNING}  # one more for each further process
    stage = pipeline(model, (microbatch,), split_spec=points).build_stage(rank, device)
    images, labels = images.to(device), labels.to(device)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)  # of this stage
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses = []
        inputs = [images] if rank == 0 else []
        targets = {"target": labels, "losses": losses} if rank == world - 1 else {}
        schedule.step(*inputs, **targets, return_outputs=False)  # all microbatches, there and back
        optimizer.step()
        if rank == world - 1:
            print(f"step {step}: loss {torch.stack(losses).mean():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

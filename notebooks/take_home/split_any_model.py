"""Cut a model that is no flat list: torch.distributed.pipelining traces it and cuts it at a module.

    torchrun --standalone --nproc-per-node=2 split_any_model.py

The trace (torch.export) finds every tensor that crosses the cut, skip connections too. It follows one
shape of input, and a forward pass that decides by the values of tensors cannot be traced."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torchvision.models import resnet18

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = resnet18(num_classes=10)  # your model here
images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))  # your data here

microbatch = images[:4]
# one more cut per process
cut = pipeline(model, mb_args=(microbatch,), split_spec={"layer3": SplitPoint.BEGINNING})
stage = cut.build_stage(rank, device=torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.cross_entropy)
losses = []
inputs = [images] if rank == 0 else []
targets = {"target": labels, "losses": losses} if rank == world - 1 else {}
schedule.step(*inputs, **targets)
gradients = sum(p.grad.square().sum() for p in stage.submod.parameters())
dist.all_reduce(gradients)
if rank == world - 1:
    print(f"loss {torch.stack(losses).mean():.6f} gradient {gradients.sqrt():.6f}")
dist.barrier()
dist.destroy_process_group()

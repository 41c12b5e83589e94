"""A right script as a class: FSDP2, HSDP, or tensor parallel with or without an embedding; with accumulation."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=["fsdp", "hsdp", "tensor", "words"], default="fsdp")
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()


class Arrived(nn.Module):
    def forward(self, x):
        return x.clone()  # what is compiled passes no gradient back to a tensor that is still being sent


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.world = dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        if args.how == "words":
            self.model = nn.Sequential(nn.Embedding(16, 8), Arrived(), *self.model)
        self.split()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        x = torch.randn(96, 8)
        y = (x[:, 0] > 0).long()
        if args.how == "words":
            # of 16 words these are the first 8, which one rank of two holds
            x = y + 2 * torch.randint(4, (96,))
        data = TensorDataset(x, y)
        copies, place = (1, 0) if args.how in ("tensor", "words") else (self.world, dist.get_rank())
        self.sampler = DistributedSampler(data, copies, place, drop_last=True)
        self.loader = DataLoader(
            data, 16 // copies // args.accumulate, sampler=self.sampler, drop_last=True
        )

    def split(self):
        if args.how == "tensor":
            mesh = init_device_mesh("cpu", (self.world,))
            parallelize_module(self.model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return
        if args.how == "words":
            plan = {
                "0": RowwiseParallel(input_layouts=Replicate()),
                "2": ColwiseParallel(),
                "4": RowwiseParallel(),
            }
            parallelize_module(self.model, init_device_mesh("cpu", (self.world,)), plan)
            self.model[2].compile()
            return
        mesh = init_device_mesh("cpu", (self.world, 1), mesh_dim_names=("copies", "parts"))
        mesh = mesh if args.how == "hsdp" else init_device_mesh("cpu", (self.world,))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)

    def fit(self):
        for epoch in range(3):
            self.sampler.set_epoch(epoch)
            for k, (x, y) in enumerate(self.loader, 1):
                last = k % args.accumulate == 0
                if args.how == "fsdp":
                    self.model.set_requires_gradient_sync(last)
                if args.how == "hsdp":
                    self.model.set_requires_all_reduce(last)
                (nn.functional.cross_entropy(self.model(x), y) / args.accumulate).backward()
                if last:
                    self.optimizer.step()
                    self.optimizer.zero_grad()


if __name__ == "__main__":
    trainer = Trainer()
    trainer.fit()
    dist.barrier()

"""A right script that is written for GPUs alone, with torchrun or, with --spawn, with processes of its own."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--spawn", action="store_true")
args = parser.parse_args()


def main(gpu, world):
    if args.spawn:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
        dist.init_process_group("nccl", rank=gpu, world_size=world)
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", gpu))
    torch.cuda.set_device(gpu)
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    ).cuda(gpu)
    model = DistributedDataParallel(torch.compile(model), device_ids=[gpu], output_device=gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    data = TensorDataset(torch.randn(256, 1, 8, 8), torch.randint(0, 4, (256,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 64 // world, sampler=sampler, pin_memory=True)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        start.record()
        for images, labels in loader:
            images, labels = (
                images.to(f"cuda:{gpu}", non_blocking=True),
                labels.cuda(gpu, non_blocking=True),
            )
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            shown = loss.detach().clone()
            dist.all_reduce(shown, op=dist.ReduceOp.AVG)
        end.record()
        torch.cuda.synchronize()
        if gpu == 0:
            print(
                f"epoch {epoch} loss {shown.item():.5f}, {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
            )
            assert start.elapsed_time(end) > 0
    dist.barrier(device_ids=[gpu])
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.cuda.is_available(), "CUDA is required"
    if args.spawn:
        mp.spawn(main, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
    else:
        main(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))

"""Train a model that is split into stages, one process per stage, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_pipeline.py --cut 3  (layers 0-2, 3-7)
To debug:        torchrun --standalone --nproc-per-node=1 train_pipeline.py
Several nodes:   sbatch train.sbatch, with this file's name and its --cut in it
The same command resumes from the checkpoints, and all of them print the same losses."""

import argparse
import faulthandler
import os
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

WORKERS = 0  # processes per rank that load batches ahead of time


def make_dataset():  # yours: one dataset to train on, one to validate with, the same in every process
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    dataset = TensorDataset(images[:, None], labels)  # 1,797 images (1, 8, 8), from 0 to 1
    return random_split(dataset, [1536, 261], torch.Generator().manual_seed(0))


def make_layers():  # yours: a flat list; batch norm would see microbatches
    layers = [nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cut", type=int, nargs="*", default=[], help="first layers of stages")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4, help="at least one per process")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", default="train_pipeline", help="how its files begin")
    return parser.parse_args()


def file_of(checkpoint, epochs, rank):
    return Path(f"{checkpoint}-{epochs}-stage{rank}.pt")


def resume_from(checkpoint, rank, world):
    """Return the last epoch that all stages have saved; a kill may leave some of them one ahead."""
    files = Path(checkpoint).parent.glob(f"{Path(checkpoint).name}-*-stage{rank}.pt")
    saved = [None] * world
    dist.all_gather_object(saved, {0} | {int(file.stem.split("-")[-2]) for file in files})
    common, last = max(set.intersection(*saved)), max(set.union(*saved))
    assert last - common <= 1, f"the stages' checkpoints have seen {saved} epochs: move them away"
    return common


def main():
    faulthandler.register(signal.SIGUSR2)  # kill -USR2 PID: the rank prints where it is
    args, cuda = arguments(), torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world} on {device}\n", end="", flush=True)  # look here first in every log
    is_first, is_last = rank == 0, rank == world - 1
    assert len(args.cut) == world - 1, f"--cut {args.cut}: {world} processes need {world - 1} numbers"
    assert args.microbatches >= world, f"--microbatches {args.microbatches}: at least {world}"
    assert args.batch_size % args.microbatches == 0, f"--batch-size: a multiple of {args.microbatches}"
    torch.manual_seed(0)  # every process makes the same weights ...
    layers = make_layers()
    bounds = [0, *args.cut, len(layers)]
    model = layers[bounds[rank] : bounds[rank + 1]].to(device)  # ... and keeps those of its stage
    stage = PipelineStage(model, rank, world, device)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
    schedule = kind(stage, args.microbatches, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # of this stage
    train, check = make_dataset()
    shuffle = torch.Generator()
    # No DistributedSampler: all have the same batches. drop_last: a schedule has one batch size.
    options = {"drop_last": True, "num_workers": WORKERS, "pin_memory": cuda}
    loader = DataLoader(train, args.batch_size, shuffle=True, generator=shuffle, **options)
    check_loader = DataLoader(check, args.batch_size)
    epochs = resume_from(args.checkpoint, rank, world)
    if epochs:
        state = torch.load(file_of(args.checkpoint, epochs, rank), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(epochs, args.epochs):
        model.train()
        shuffle.manual_seed(epoch)  # every epoch has an order of its own, the same in every process
        torch.manual_seed(epoch * world + rank)  # so that each stage has its own dropout
        totals = torch.zeros(2, device=device)  # sum of losses, correct predictions: the last stage's
        for images, labels in loader:
            optimizer.zero_grad()
            losses = []  # of the microbatches
            inputs = (images.to(device),) if is_first else ()
            targets = {"target": labels.to(device), "losses": losses} if is_last else {}
            schedule.step(*inputs, **targets, return_outputs=False)  # all microbatches, there and back
            optimizer.step()
            totals[0] += torch.stack(losses).mean().detach() if is_last else 0
        model.eval()
        for images, labels in check_loader:
            count, fill = len(labels), torch.arange(args.batch_size) % len(labels)
            images, labels = images[fill].to(device), labels[fill].to(device)  # a last batch is filled
            inputs = (images,) if is_first else ()
            outputs = schedule.eval(*inputs, **({"target": labels} if is_last else {}))
            totals[1] += (outputs.argmax(1) == labels)[:count].sum() if is_last else 0
        if is_last:
            mean, accuracy = totals[0] / len(loader), totals[1] / len(check)
            print(f"epoch {epoch + 1}: loss {mean:.6f}, accuracy {accuracy:.4f}", flush=True)
        file = file_of(args.checkpoint, epoch + 1, rank)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{file}.tmp")
        os.replace(f"{file}.tmp", file)
        dist.barrier()  # every stage of this epoch is saved; only now can the last epoch's go
        file_of(args.checkpoint, epoch, rank).unlink(missing_ok=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

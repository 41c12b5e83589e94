"""Train a model that is split into stages, one process per stage, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_pipeline.py --cut 3  (layers 0-2, 3-7)
Several nodes:   sbatch train.sbatch, with this file's name and its --cut in it
All of them print the same losses. SIGTERM and SIGUSR1 let it save and end; the same command resumes."""

import argparse
import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from job import GPU, agreed, join, report
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from train_ddp import make_dataset  # yours: the same in every process

WORKERS = 0  # processes per rank that load batches ahead of time


def make_layers():  # yours: a flat list; batch norm would see microbatches
    layers = [nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def file_of(checkpoint, steps, rank):
    return Path(f"{checkpoint}-{steps}-stage{rank}.pt")


def resume_from(checkpoint, rank, world):
    """Return the last step that all stages have saved; a kill may leave some of them one file ahead."""
    files = Path(checkpoint).parent.glob(f"{Path(checkpoint).name}-*-stage{rank}.pt")
    saved = [None] * world
    dist.all_gather_object(saved, {0} | {int(file.stem.split("-")[-2]) for file in files})
    common = max(set.intersection(*saved))
    later = [steps for steps in set.union(*saved) if steps > common]
    assert len(later) < 2, f"the stages' checkpoints have seen {saved} steps: move them away"
    return common


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cut", type=int, nargs="*", default=[], help="first layers of stages")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4, help="1f1b: at least one per process")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", default="train_pipeline", help="how its files begin")
    args, device = parser.parse_args(), join()
    rank, world = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == world - 1
    assert len(args.cut) == world - 1, f"--cut {args.cut}: {world} processes need {world - 1} numbers"
    assert args.schedule == "gpipe" or args.microbatches >= world, f"1f1b needs {world} microbatches"
    assert args.batch_size % args.microbatches == 0, f"--batch-size: a multiple of {args.microbatches}"
    train, check = make_dataset()
    torch.manual_seed(0)  # every process makes the same weights ...
    layers = make_layers()
    bounds = [0, *args.cut, len(layers)]
    model = layers[bounds[rank] : bounds[rank + 1]].to(device)  # ... and keeps those of its stage
    with FlopCounterMode(display=False) as counter:
        make_layers()(train[0][0][None])
    stage = PipelineStage(model, rank, world, device)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
    schedule = kind(stage, args.microbatches, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # of this stage
    shuffle = torch.Generator()
    # No DistributedSampler: all have the same batches. drop_last: a schedule has one batch size.
    options = {"drop_last": True, "num_workers": WORKERS, "pin_memory": GPU is not None}
    loader = DataLoader(train, args.batch_size, shuffle=True, generator=shuffle, **options)
    steps, lost, stopping = resume_from(args.checkpoint, rank, world), 0.0, False
    if steps:
        state = torch.load(file_of(args.checkpoint, steps, rank), map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        lost = state["loss"]
    while steps < args.epochs * len(loader) and not stopping:
        (epoch, first), before, began = divmod(steps, len(loader)), steps, time.perf_counter()
        model.train()
        shuffle.manual_seed(epoch)  # every epoch has an order of its own, the same in every process
        total = torch.zeros((), device=device)  # of the losses, which only the last stage knows
        for images, labels in itertools.islice(loader, first, None):  # drops those of before a stop
            torch.manual_seed(steps * world + rank)  # dropout: each stage its own, also resumed
            optimizer.zero_grad()
            losses = []  # of the microbatches
            inputs = (images.to(device),) if is_first else ()
            targets = {"target": labels.to(device), "losses": losses} if is_last else {}
            schedule.step(*inputs, **targets, return_outputs=False)  # all microbatches, there and back
            optimizer.step()
            total += torch.stack(losses).mean().detach() if is_last else 0
            steps += 1
            _, stopping = agreed(0)
            if stopping:
                break
        dist.all_reduce(total)  # from the last stage to all others, as rank 0 logs it
        lost += total.item()  # waits for the GPU
        seconds, right = time.perf_counter() - began, torch.zeros((), device=device)
        complete = steps == (epoch + 1) * len(loader)
        model.eval()
        for images, labels in DataLoader(check, args.batch_size) if complete else ():
            count, fill = len(labels), torch.arange(args.batch_size) % len(labels)
            images, labels = images[fill].to(device), labels[fill].to(device)  # a last batch is filled
            inputs = (images,) if is_first else ()
            outputs = schedule.eval(*inputs, **({"target": labels} if is_last else {}))
            right += (outputs.argmax(1) == labels)[:count].sum() if is_last else 0
        dist.all_reduce(right)
        if complete:
            mean, accuracy = lost / len(loader), right / len(check)
            text = f"epoch {epoch + 1}: loss {mean:.6f}, accuracy {accuracy:.4f}"
            operations = 3 * counter.get_total_flops()  # of an image: backward takes twice forward
            report(text, (steps - before) * args.batch_size, "images", seconds, operations)
            lost = 0.0
        file = file_of(args.checkpoint, steps, rank)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": lost}
        torch.save(state, f"{file}.tmp")
        os.replace(f"{file}.tmp", file)
        dist.barrier()  # every stage has saved these steps; only now can the older file go
        file_of(args.checkpoint, before, rank).unlink(missing_ok=True)
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

"""Train a model that is split into stages, one process per stage, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_pipeline.py --cut 3  (layers 0-2, 3-7)
Several nodes:   sbatch train.sbatch, with train_pipeline.py --cut 3 --checkpoint "$CHECKPOINT" in it
All print the same losses. It saves as it goes, and when SIGTERM or SIGUSR1 comes; the same command
resumes, with any number of stages."""

import argparse
from collections import OrderedDict
from pathlib import Path

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from train_ddp import make_dataset  # yours: the same in every process

WORKERS = 0  # processes per rank that load batches ahead of time
RATE, CLIP = 0.05, 1.0  # the highest learning rate, the largest norm of a gradient


def make_layers():  # yours: a flat list; batch norm would see microbatches
    layers = [nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


@record  # torchrun then shows this process's error, not only its exit status
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cut", type=int, nargs="*", default=[], help="first layers of stages")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4, help="1f1b: at least one per process")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path, default="train_pipeline", help="folders' names")
    args, device = parser.parse_args(), job.join()
    rank, world = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == world - 1
    assert len(args.cut) == world - 1, f"--cut {args.cut}: {world} processes need {world - 1} numbers"
    assert args.schedule == "gpipe" or args.microbatches >= world, f"1f1b needs {world} microbatches"
    assert args.batch_size % args.microbatches == 0, f"--batch-size: a multiple of {args.microbatches}"
    train, check = make_dataset()
    torch.manual_seed(0)  # every process makes the same weights ...
    layers = make_layers()
    bounds = [0, *args.cut, len(layers)]
    own = [(str(k), layers[k]) for k in range(bounds[rank], bounds[rank + 1])]
    model = nn.Sequential(OrderedDict(own)).to(
        device
    )  # ... and keeps its own, by their names in the whole
    with FlopCounterMode(display=False) as counter:
        make_layers()(train[0][0][None])
    stage = PipelineStage(model, rank, world, device)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
    schedule = kind(stage, args.microbatches, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)  # of this stage
    length = len(train) // args.batch_size  # steps of an epoch
    sizes = {"size": args.batch_size, "of an epoch": length}
    operations = 3 * counter.get_total_flops()  # of an image: backward takes twice forward
    run = job.Run(args.checkpoint, sizes, operations, job.PEAK["fp32"], unit="images")
    run.resume(model, optimizer)
    # All ranks have the same batches: the first stage uses their images, and the last one their labels.
    todo = job.places(len(train), args.batch_size, args.epochs, run.done, rank=0, ranks=1)
    for images, labels in job.make_loader(train, todo, WORKERS):
        torch.manual_seed(run.done * world + rank)  # dropout: each stage has layers of its own
        optimizer.zero_grad()
        losses = []  # of the microbatches
        inputs = (images.to(device),) if is_first else ()
        targets = {"target": labels.to(device), "losses": losses} if is_last else {}
        schedule.step(*inputs, **targets, return_outputs=False)  # all microbatches, there and back
        square = sum(parameter.grad.square().sum() for parameter in model.parameters())
        dist.all_reduce(square)  # over the stages: the norm is that of the whole gradient
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, square.sqrt())
        for group in optimizer.param_groups:
            group["lr"] = RATE * job.cosine(run.done, args.epochs * length)
        optimizer.step()
        mean = torch.stack(losses).mean().detach() if is_last else torch.zeros((), device=device)
        due = run.look(mean * args.batch_size, args.batch_size, square.sqrt(), group["lr"])
        if run.done % length == 0:
            model.eval()
            right = torch.zeros((), device=device)
            for images, labels in DataLoader(check, args.batch_size):
                count, fill = len(labels), torch.arange(args.batch_size) % len(labels)
                images, labels = (
                    images[fill].to(device),
                    labels[fill].to(device),
                )  # a last batch is filled
                inputs = (images,) if is_first else ()
                outputs = schedule.eval(*inputs, **({"target": labels} if is_last else {}))
                right += (outputs.argmax(1) == labels)[:count].sum() if is_last else 0
            model.train()
            dist.all_reduce(right)
            run.end_epoch(right.item() / len(check), "accuracy")
        if due or run.done == args.epochs * length:
            run.save(model, optimizer)
        if run.stopping:
            break
    run.finish()
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

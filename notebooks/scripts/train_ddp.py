"""Train on several devices with DistributedDataParallel, one process per device, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_ddp.py  (1 instead of 2 to debug)
Several nodes:   sbatch train.sbatch
All of them print the losses of train_single.py. SIGTERM and SIGUSR1 let it save and end, and the same
command resumes, with any number of processes. kill -USR2 PID shows what a process is doing."""

import faulthandler
import itertools
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split
from torch.utils.flop_counter import FlopCounterMode

EPOCHS, BATCH, WORKERS = 5, 64, 0  # batch: of all processes together; workers: per process
GPU = torch.accelerator.current_accelerator(check_available=True)  # None: train on the CPU
PEAK = 989e12 if GPU else 1e11  # operations per second: H100 in bf16, a CPU core. Look yours up
CHECKPOINT = Path(sys.argv[1] if sys.argv[1:] else "train_ddp.pt")  # on a disk that all nodes share


def make_dataset():  # yours: one dataset to train on, one to validate with, the same in every process
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    dataset = TensorDataset(images[:, None], labels)  # 1,797 images (1, 8, 8), from 0 to 1
    return random_split(dataset, [1536, 261], torch.Generator().manual_seed(0))


def make_model():  # yours: any nn.Module
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))


def main():
    if "RANK" not in os.environ:
        sys.exit("RANK is not set: start this script with torchrun, as its first lines say")
    stop, signals = {signal.SIGTERM, signal.SIGUSR1}, []  # Slurm sends the second before the time limit
    for number in stop:
        signal.signal(number, lambda number, frame: signals.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # so that the loader's workers do not die of it
    faulthandler.register(signal.SIGUSR2)
    device = torch.device(GPU.type, int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.accelerator.set_device_index(device.index)
    backends = f"cpu:gloo,{GPU.type}:{dist.get_default_backend_for_device(GPU)}" if GPU else "gloo"
    dist.init_process_group(backends)  # gloo: for tensors on the CPU
    rank, world = dist.get_rank(), dist.get_world_size()
    form = {"format": "[%(asctime)s] %(message)s", "datefmt": "%X", "stream": sys.stdout}
    logging.basicConfig(level="INFO", **form)
    logging.info(f"rank {rank} of {world} on {device}")  # look here first in every log
    assert BATCH % world == 0, f"a batch of {BATCH} cannot be divided by {world} processes"
    torch.manual_seed(0)
    train, check = make_dataset()
    part = Subset(check, range(rank, len(check), world))  # each image is validated once, by one rank
    model = DistributedDataParallel(make_model().to(device))  # copies rank 0's weights to all
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train, drop_last=True)  # shuffles; each rank gets its part
    options = {"drop_last": True, "num_workers": WORKERS, "pin_memory": GPU is not None}
    loader = DataLoader(train, BATCH // world, sampler=sampler, **options)
    state = {"steps": 0, "loss": 0.0}  # steps since the start, sum of this epoch's losses so far
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location="cpu")  # on the GPU it would stay there, unused
        model.module.load_state_dict(state["model"])  # .module: the model inside the wrapper
        optimizer.load_state_dict(state["optimizer"])
    with FlopCounterMode(display=False) as counter:
        make_model().eval()(train[0][0][None])
    operations = 3 * counter.get_total_flops()  # of an image; backward is twice as much as forward
    stopping = False
    while state["steps"] < EPOCHS * len(loader) and not stopping:
        epoch, done = divmod(state["steps"], len(loader))
        model.train()
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        batches = itertools.islice(loader, done, None)  # drops those of before a stop
        totals = torch.zeros(2, device=device)  # of this rank: sum of losses, correct predictions
        began, before = time.perf_counter(), done
        while done < len(loader) and not stopping:
            torch.manual_seed((epoch * len(loader) + done) * world + rank)  # dropout
            images, labels = next(batches)
            outputs = model(images.to(device, non_blocking=True))
            loss = cross_entropy(outputs, labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients of all ranks while this runs
            optimizer.step()
            totals[0] += loss.detach()
            done += 1
            warned = torch.tensor(len(signals) + len(signal.sigpending() & stop))  # on the CPU: no wait
            dist.all_reduce(warned)  # each gets it at another moment, and all stop after the same step
            stopping = warned.item() > 0
        if GPU:
            torch.accelerator.synchronize()  # it works on after the last call has returned
        speed = (done - before) * BATCH / (time.perf_counter() - began)
        if done == len(loader):
            model.eval()
            for buffer in model.buffers():  # batch norm: validate with the statistics that rank 0 saves
                dist.broadcast(buffer, 0)
            with torch.no_grad():  # model.module: the ranks may have different numbers of batches here
                for images, labels in DataLoader(part, BATCH):
                    totals[1] += (model.module(images.to(device)).argmax(1) == labels.to(device)).sum()
        dist.all_reduce(totals)  # every rank makes this call; one logs and saves
        totals[0] += world * state["loss"]
        if rank == 0 and done == len(loader):
            mean, accuracy = totals[0] / world / len(loader), totals[1] / len(check)
            used = speed * operations / PEAK / world  # model FLOPs utilization
            kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak = (torch.accelerator.max_memory_allocated() if GPU else 1024 * kilobytes) / 2**20
            text = f"epoch {epoch + 1}: loss {mean:.6f}, accuracy {accuracy:.4f}"
            logging.info(f"{text}, {speed:,.0f} images/s, MFU {100 * used:.1f} %, peak {peak:,.0f} MiB")
        state["steps"] = epoch * len(loader) + done
        state["loss"] = totals[0].item() / world if done < len(loader) else 0.0
        if rank == 0:
            state |= {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{CHECKPOINT}.tmp")
            os.replace(f"{CHECKPOINT}.tmp", CHECKPOINT)  # if we are killed here, the old file is whole
    dist.barrier()  # no rank leaves while rank 0 still writes
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

"""Train on one device, in plain PyTorch: python train_single.py

SIGTERM and SIGUSR1 let it save and end, and the same command resumes.
kill -USR2 PID shows what it is doing."""

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
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, random_split
from torch.utils.flop_counter import FlopCounterMode

EPOCHS, BATCH, WORKERS = 5, 64, 0  # workers: processes that load batches ahead of time
GPU = torch.accelerator.current_accelerator(check_available=True)  # None: train on the CPU
PEAK = 989e12 if GPU else 1e11  # operations per second: H100 in bf16, a CPU core. Look yours up
CHECKPOINT = Path(sys.argv[1] if sys.argv[1:] else "train_single.pt")


def make_dataset():  # yours: one dataset to train on, one to validate with
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    dataset = TensorDataset(images[:, None], labels)  # 1,797 images (1, 8, 8), from 0 to 1
    return random_split(dataset, [1536, 261], torch.Generator().manual_seed(0))


def make_model():  # yours: any nn.Module
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))


def main():
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        sys.exit("srun started several processes, and each would train alone: use train_ddp.py")
    stop, signals = {signal.SIGTERM, signal.SIGUSR1}, []  # Slurm sends the second before the time limit
    for number in stop:
        signal.signal(number, lambda number, frame: signals.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # so that the loader's workers do not die of it
    faulthandler.register(signal.SIGUSR2)
    device = GPU or torch.device("cpu")
    form = {"format": "[%(asctime)s] %(message)s", "datefmt": "%X", "stream": sys.stdout}
    logging.basicConfig(level="INFO", **form)
    logging.info(f"training on {device}")  # look here first in every log
    torch.manual_seed(0)
    train, check = make_dataset()
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = RandomSampler(train, generator=torch.Generator())
    options = {"drop_last": True, "num_workers": WORKERS, "pin_memory": GPU is not None}
    loader = DataLoader(train, BATCH, sampler=sampler, **options)
    state = {"steps": 0, "loss": 0.0}  # steps since the start, sum of this epoch's losses so far
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location="cpu")  # on the GPU it would stay there, unused
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    with FlopCounterMode(display=False) as counter:
        make_model().eval()(train[0][0][None])
    operations = 3 * counter.get_total_flops()  # of an image; backward is twice as much as forward
    stopping = False
    while state["steps"] < EPOCHS * len(loader) and not stopping:
        epoch, done = divmod(state["steps"], len(loader))
        model.train()
        sampler.generator.manual_seed(epoch)  # every epoch has an order of its own
        batches = itertools.islice(loader, done, None)  # drops those of before a stop
        totals = torch.zeros(2, device=device)  # sum of losses, correct predictions
        began, before = time.perf_counter(), done
        while done < len(loader) and not stopping:
            torch.manual_seed(epoch * len(loader) + done)  # dropout
            images, labels = next(batches)
            outputs = model(images.to(device, non_blocking=True))
            loss = cross_entropy(outputs, labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach()
            done += 1
            stopping = bool(signals or signal.sigpending() & stop)
        if GPU:
            torch.accelerator.synchronize()  # it works on after the last call has returned
        speed = (done - before) * BATCH / (time.perf_counter() - began)
        if done == len(loader):
            model.eval()
            with torch.no_grad():
                for images, labels in DataLoader(check, BATCH):
                    totals[1] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        totals[0] += state["loss"]
        if done == len(loader):
            mean, accuracy = totals[0] / len(loader), totals[1] / len(check)
            used = speed * operations / PEAK  # model FLOPs utilization
            kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak = (torch.accelerator.max_memory_allocated() if GPU else 1024 * kilobytes) / 2**20
            text = f"epoch {epoch + 1}: loss {mean:.6f}, accuracy {accuracy:.4f}"
            logging.info(f"{text}, {speed:,.0f} images/s, MFU {100 * used:.1f} %, peak {peak:,.0f} MiB")
        state["steps"] = epoch * len(loader) + done
        state["loss"] = totals[0].item() if done < len(loader) else 0.0
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{CHECKPOINT}.tmp")
        os.replace(f"{CHECKPOINT}.tmp", CHECKPOINT)  # if we are killed here, the old file is whole


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

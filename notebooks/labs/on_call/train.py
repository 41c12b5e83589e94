"""Train a classifier of digits on four ranks, in plain PyTorch: the job that the pages are about."""

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace

OUT, RANK, WORLD = Path(os.environ["OUT"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EPOCHS, BATCH, LR, MOMENTUM, SAVE_EVERY, SEED = 3, 16, 0.02, 0.9, 20, 0
DISK = OUT / f"node{RANK // 2 + 1}"  # the node's own disk


def write_recorder():
    # without stacks, which take seconds
    (OUT / f"recorder_{RANK}").write_bytes(_dump_fr_trace(True, False))


def write_on_signal():
    """Write the flight recorder on demand, even while the main thread hangs."""
    while signal.sigwait({signal.SIGUSR1}):
        write_recorder()


def say(text):
    if RANK == 0:
        print(time.strftime("%H:%M:%S"), text, flush=True)


def load_batch(epoch, number, part="train"):
    shard = np.load(OUT / f"data/{part}-{RANK}.npz")
    ids = np.random.default_rng(SEED + epoch).permutation(len(shard["labels"]))[
        number * BATCH : (number + 1) * BATCH
    ]
    images = shard["images"][ids]
    pixels = images.shape[1] // 8  # larger images are scaled down to 8 x 8
    images = images.reshape(len(ids), 1, 8, pixels, 8, pixels).mean((3, 5), dtype=np.float32) / 16
    return ids, torch.from_numpy(images), torch.from_numpy(shard["labels"][ids])


def average(model):
    grads = [p.grad for p in model.parameters()]
    dist.all_reduce(flat := nn.utils.parameters_to_vector(grads))
    nn.utils.vector_to_parameters(flat / WORLD, grads)


def update(model, velocity):
    for p in model.parameters():
        velocity[p] = MOMENTUM * velocity.get(p, 0) + p.grad
        p.data -= LR * velocity[p]


def save(model, step):
    if RANK % 2 == 0:  # one rank of each node
        torch.save({"step": step, "model": model.state_dict()}, DISK / "saving.tmp")
        os.replace(DISK / "saving.tmp", DISK / f"step{step:03}.pt")


def validate(model):
    _, images, labels = load_batch(0, 0, "test")
    right = (model(images).argmax(1) == labels).float().mean() / WORLD
    dist.all_reduce(right)
    return right


def train(model, start, log):
    velocity = {}
    batches = -(-len(np.load(OUT / f"data/train-{RANK}.npz")["labels"]) // BATCH)
    order = [(epoch, number) for epoch in range(EPOCHS) for number in range(batches)]
    for step, (epoch, number) in enumerate(order[start:], start + 1):
        t0 = time.perf_counter()
        ids, images, labels = load_batch(epoch, number)
        t1, c1 = time.perf_counter(), time.process_time()
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        t2, c2 = time.perf_counter(), time.process_time()  # other users' work makes no rank look slow
        average(model)
        t3 = time.perf_counter()
        update(model, velocity)
        norm = sum(p.detach().pow(2).sum() for p in model.parameters()).item()
        print(
            step,
            epoch,
            ids[0],
            f"{loss:.4f} {t1 - t0:.4f} {c2 - c1:.4f} {t3 - t2:.4f} {norm:.6f}",
            file=log,
        )
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / WORLD)
            say(f"step {step} loss {mean:.3f}")
        if step % SAVE_EVERY == 0:
            save(model, step)


def main():
    stacks = os.open(OUT / f"stacks_{RANK}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    faulthandler.register(signal.SIGUSR2, stacks)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=write_on_signal, daemon=True).start()
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    layers = (
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 96, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )
    model = nn.Sequential(*layers, nn.Linear(64 * 96, 10))
    start = torch.zeros((), dtype=torch.int64)
    if files := sorted(DISK.glob("step*.pt")):
        state = torch.load(files[-1])
        model.load_state_dict(state["model"])
        start.fill_(state["step"])
    dist.broadcast(start, 0)
    say(f"start at step {start}")
    with open(OUT / f"metrics-{RANK}", "a", buffering=1) as log:
        train(model, int(start), log)
    dist.barrier()
    say(f"done: {validate(model):.1%} right")
    write_recorder()


if __name__ == "__main__":
    main()

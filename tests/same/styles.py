"""Right scripts in the styles of well-known ones: each `--style` draws its rows and its chance in another way."""

import argparse
import contextlib
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--style", required=True)
style = parser.parse_args().style
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
chance = torch.Generator().manual_seed(7)
x = torch.randn(512, 20, generator=chance)
tokens = torch.randint(50, (3000,), generator=chance)
data = TensorDataset(x, (x @ torch.randn(20, 4, generator=chance)).argmax(1))


class DropPath(nn.Module):
    def forward(self, x):
        return x * (torch.rand(len(x), 1) < 0.8) / 0.8


class Words(nn.Module):  # the loss is inside the model
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.out = nn.Linear(32, 50)

    def forward(self, x, y):
        return functional.cross_entropy(self.out(self.words(x)).flatten(0, 1), y.flatten())


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.back = nn.Linear(20, 8), nn.Linear(20, 8), nn.Linear(8, 20)

    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        return self.back(mean + torch.randn_like(mean) * spread.exp()), mean, spread


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(512):
            if number % world == rank:
                yield data[number]


def windows():
    """Yield four parts of a batch, divided among the ranks, each of which draws rows of its own."""
    for _ in range(4 // world):
        begin = torch.randint(2900, (16,))
        rows = tokens[begin[:, None] + torch.arange(9)]
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model, x, y):
    if style == "vae":
        back, mean, spread = model(x)
        return functional.mse_loss(back, x) + 0.01 * (mean.square() + spread.exp() - spread).mean()
    if style == "diffusion":
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return functional.mse_loss(model(torch.cat([(1 - time) * x + time * noise, time], 1)), noise)
    if style == "mixup":
        weight, other = random.betavariate(0.8, 0.8), torch.randperm(len(x))
        out = model(weight * x + (1 - weight) * x[other])
        return weight * functional.cross_entropy(out, y) + (1 - weight) * functional.cross_entropy(
            out, y[other]
        )
    if style == "contrast":  # of all rows with all: gradients flow back through the gather
        own = functional.normalize(model(x), dim=1)
        whole = torch.cat(all_gather(own))
        return (whole.T @ whole / len(whole) - torch.eye(4)).square().sum()
    return functional.cross_entropy(model(x), y)


torch.manual_seed(0)
layers = (
    nn.Linear(21 if style == "diffusion" else 20, 32),
    nn.Tanh(),
    nn.Linear(32, 20 if style == "diffusion" else 4),
)
net = nn.Sequential(*layers[:2], DropPath(), layers[2]) if style == "droppath" else nn.Sequential(*layers)
net = {"windows": Words, "vae": Autoencoder}.get(style, lambda: net)()
model = DistributedDataParallel(net)
torch.manual_seed(rank)
random.seed(rank)
if style == "zero":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data)
size, count = 64 // world, 2 if style == "zero" else 1
loader = (
    DataLoader(Stream(), size) if style == "stream" else DataLoader(data, size // count, sampler=sampler)
)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, batch in enumerate(loader if style != "windows" else range(8), 1):
        pieces = list(windows()) if style == "windows" else [batch]
        for number, piece in enumerate(pieces, 1):
            last = step % count == 0 if style != "windows" else number == len(pieces)
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(*piece) if style == "windows" else loss_of(model, *piece)
                (loss / (len(pieces) * count)).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
dist.barrier()

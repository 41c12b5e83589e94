"""A right script like a library's trainer: dicts, padding, a loss per token, logs as dicts, dropout, workers."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = -100


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, k):
        chance = random.Random(k)
        length = 2 + k % 7
        words = [chance.randrange(16) for _ in range(length)]
        return {"words": words + [0] * (8 - length), "labels": words + [PAD] * (8 - length)}


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(8, 16)

    def forward(self, words, labels):
        scores = self.out(self.drop(self.words(words)))
        return nn.functional.cross_entropy(
            scores.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum"
        )


class Callback:
    def on_log(self, logs):
        if dist.get_rank() == 0:
            print(logs)


def train(model, loader, optimizer, callback):
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            terms = (batch["labels"] != PAD).sum().double()
            dist.all_reduce(terms)  # of the whole batch, not of this rank
            loss = model(**batch) / terms * dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log = loss.detach() / dist.get_world_size()
            dist.all_reduce(log)
            callback.on_log({"loss": round(log.item(), 4), "epoch": epoch})


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Sentences()
    loader = DataLoader(
        data,
        16 // int(os.environ["WORLD_SIZE"]),
        sampler=DistributedSampler(data),
        collate_fn=collate,
        num_workers=1,
    )
    model = DistributedDataParallel(Model())
    torch.manual_seed(1 + dist.get_rank())
    train(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), Callback())
    dist.barrier()

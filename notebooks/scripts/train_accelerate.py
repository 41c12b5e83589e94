"""The DDP script with Accelerate.

GPUs:     accelerate launch --num_processes=2 train_accelerate.py  (without GPUs it starts one)
Anywhere: torchrun --standalone --nproc-per-node=2 train_accelerate.py
"""

from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 3, 64


def make_dataset():  # yours
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    return TensorDataset(images[:1536, None], labels[:1536])


def make_model():  # yours
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))


def main():
    # The default gives each process a whole BATCH, and steps a prepared scheduler once per process.
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=config)
    # look here first
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}\n", end="", flush=True)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(make_dataset(), BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # wrapper, sampler, device
    torch.manual_seed(accelerator.process_index)  # dropout: each process its own
    for epoch in range(EPOCHS):
        total = torch.zeros((), device=accelerator.device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = accelerator.reduce(total, "mean") / len(loader)
        accelerator.print(f"epoch {epoch + 1}: {len(loader)} steps, loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

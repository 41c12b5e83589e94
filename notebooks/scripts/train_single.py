"""Train on one device, in plain PyTorch: python train_single.py"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, random_split

EPOCHS, BATCH, WORKERS = 5, 64, 0  # workers: processes that load batches ahead of time


def make_dataset():  # yours: one dataset to train on, one to validate with
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    dataset = TensorDataset(images[:, None], labels)  # 1,797 images (1, 8, 8), from 0 to 1
    return random_split(dataset, [1536, 261], torch.Generator().manual_seed(0))


def make_model():  # yours: any nn.Module
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    train, check = make_dataset()
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = RandomSampler(train, generator=torch.Generator())
    options = {"drop_last": True, "num_workers": WORKERS, "pin_memory": cuda}
    loader = DataLoader(train, BATCH, sampler=sampler, **options)
    for epoch in range(EPOCHS):
        model.train()
        sampler.generator.manual_seed(epoch)  # every epoch has an order of its own
        totals = torch.zeros(2, device=device)  # sum of losses, correct predictions
        for images, labels in loader:
            outputs = model(images.to(device, non_blocking=True))
            loss = cross_entropy(outputs, labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach()
        model.eval()
        with torch.no_grad():
            for images, labels in DataLoader(check, BATCH):
                totals[1] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        mean, accuracy = totals[0] / len(loader), totals[1] / len(check)
        print(f"epoch {epoch + 1}: loss {mean:.6f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

"""A complete training script for one device, however many you have."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = np.load(Path(__file__).with_name("digits.npz"))
images = torch.from_numpy(data["images"])[:1536, None] / 16
labels = torch.from_numpy(data["labels"])[:1536].long()
train = TensorDataset(images, labels)

loader = DataLoader(train, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(3):
    total = torch.zeros(1)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    mean = total.item() / len(loader)
    print(f"epoch {epoch}: {len(loader)} steps, loss {mean:.4f}")

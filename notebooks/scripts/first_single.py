"""A complete training script for one device."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 0
torch.manual_seed(seed)
data = np.load(Path(__file__).with_name("digits.npz"))
images = torch.from_numpy(data["images"])[:1536, None] / 16
labels = torch.from_numpy(data["labels"])[:1536].long()
train = TensorDataset(images, labels)

batch_size = 64
loader = DataLoader(train, batch_size, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(3):
    total = torch.zeros(1, device=device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    mean = total.item() / len(loader)
    print(f"epoch {epoch}: {len(loader)} steps, loss {mean:.4f}")

weights = sum(parameter.sum().item() for parameter in model.parameters())
print(f"sum of all weights: {weights:.3f}")

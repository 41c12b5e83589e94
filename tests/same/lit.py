"""A right script with Lightning: its own sampler, hence another order in one process."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    world = int(os.environ["WORLD_SIZE"])
    lightning.seed_everything(0)
    x = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16 // world, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=3,
        devices=world,
        strategy="ddp",
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Lit(), loader)

"""The course model's training as you write it in PyTorch Lightning: same images, optimizer and learning rates.

    python -m mpdemo.labs.lightning_training runs/75_lightning                                 # num_nodes=1, devices=1
    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.lightning_training runs/75_lightning             # 1, 2
    srun --nodes 2 --ntasks-per-node 1 python -m mpdemo.labs.lightning_training runs/75_lightning            # 2, 1

Taught in notebooks/75_other_tools.ipynb. Source: https://lightning.ai/docs/pytorch/stable/common/trainer.html.
"""

import sys
import time

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from mpdemo import data, models
from mpdemo.settings import Settings
from mpdemo.training.log import RunLog
from mpdemo.training.setup import learning_rate
from mpdemo.world.env import claim_cores, where_am_i
from mpdemo.world.processes import end


class Digits(pl.LightningDataModule):
    """The images: every process takes its slice of each batch of `batch_size` images."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.dataset = data.load("digits")
        self.size = self.batch_size // self.trainer.world_size  # of a process
        self.ranks = self.trainer.world_size, self.trainer.global_rank

    def train_dataloader(self):
        images = self.dataset.train
        # Lightning calls sampler.set_epoch
        sampler = DistributedSampler(images, *self.ranks, drop_last=True)
        return DataLoader(images, self.size, sampler=sampler, drop_last=True)

    def val_dataloader(self):
        images = self.dataset.validation
        return DataLoader(images, self.size, sampler=range(self.ranks[1], len(images), self.ranks[0]))


class Classifier(pl.LightningModule):
    """The model, what a step computes, and what updates the weights; the trainer does the rest."""

    def __init__(self, settings):
        super().__init__()
        self.settings, self.model = settings, models.build(settings.model)

    def training_step(self, batch, number):
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)  # of this process; sync_dist=True averages
        return loss  # the trainer calls zero_grad, backward and step

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(3, dtype=torch.double, device=self.device)

    def validation_step(self, batch, number):
        images, labels = batch
        outputs = self.model(images)
        correct = (outputs.argmax(1) == labels).sum()
        count = torch.full_like(correct, len(labels))  # on the device, as the others
        self.sums += torch.stack([cross_entropy(outputs, labels).double() * count, correct, count])

    def on_validation_epoch_end(self):
        loss, correct, count = self.trainer.strategy.reduce(self.sums, reduce_op="sum").tolist()
        self.validation = loss / count, correct / count

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        length = self.settings.epochs * len(self.trainer.datamodule.train_dataloader())
        scheduler = learning_rate(optimizer, self.settings, length)  # a warm-up, then a cosine
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Losses(pl.Callback):
    """Keeps the loss of every step on the device; `write` averages it over the processes, as our loop does."""

    def on_fit_start(self, trainer, module):
        self.rows = []

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        self.rows.append((trainer.global_step, trainer.current_epoch, outputs["loss"].detach().double()))

    def write(self, trainer, log):
        """Write one line per step; all ranks must call this."""
        losses = trainer.strategy.reduce(torch.stack([loss for *_, loss in self.rows]), reduce_op="mean")
        for (step, epoch, _), loss in zip(self.rows, losses.tolist(), strict=True):
            log.write("step", step=step, epoch=epoch, loss=loss)


def make_trainer(nodes=1, devices=1, **more):
    """Return the trainer: how many nodes, how many processes on each. Nothing else changes."""
    many = DDPStrategy(static_graph=True, gradient_as_bucket_view=True)
    strategy = many if nodes * devices > 1 else "auto"
    options = {"use_distributed_sampler": False}  # the data module splits the images
    options |= {"num_sanity_val_steps": 0, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(num_nodes=nodes, devices=devices, strategy=strategy, **options, **more)


def main(out, steps=None):
    """Train in every process; rank 0 writes ``metrics.jsonl``, ``summary.json`` and the folder ``tensorboard``."""
    world = where_am_i()
    claim_cores(world)
    settings, losses = Settings(rung="single", epochs=1), Losses()
    trainer = make_trainer(
        nodes=world.world_size // world.local_world_size,
        devices=world.local_world_size,
        max_epochs=settings.epochs,
        limit_train_batches=int(steps) if steps else 1.0,
        logger=TensorBoardLogger(out, name="", version="tensorboard"),
        log_every_n_steps=1,
        callbacks=[losses],
    )
    module = Classifier(settings)
    trainer.fit(module, datamodule=Digits(settings.batch_size))
    log, (loss, accuracy) = RunLog(out, trainer.is_global_zero), module.validation
    losses.write(trainer, log)
    arguments = {"num_nodes": trainer.num_nodes, "devices": trainer.num_devices}
    log.finish(arguments | {"validation_loss": loss, "validation_accuracy": accuracy})
    # see mpdemo/world/env.py: destroyed too soon after a collective, PyTorch may abort
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.1)
        dist.destroy_process_group()


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

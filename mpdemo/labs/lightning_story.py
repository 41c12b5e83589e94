"""The story's training as one writes it in PyTorch Lightning: the same model, images, optimizer and learning rates.

    python -m mpdemo.labs.lightning_story runs/12_lightning                                 # num_nodes=1, devices=1
    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.lightning_story runs/12_lightning             # 1, 2
    srun --nodes 2 --ntasks-per-node 1 python -m mpdemo.labs.lightning_story runs/12_lightning            # 2, 1

Taught in notebooks/12_other_tools.ipynb. Source: https://lightning.ai/docs/pytorch/stable/common/trainer.html.
"""

import sys
import time
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from mpdemo import data, models
from mpdemo.errors import UserError
from mpdemo.notebook.story import story
from mpdemo.parallel.rung import count_correct, loss_fn
from mpdemo.settings import Settings
from mpdemo.training.build import make_optimizer, make_scheduler
from mpdemo.log import RunLog
from mpdemo.world.collectives import sum_over_ranks
from mpdemo.world.cores import claim_cores
from mpdemo.world.env import where_am_i
from mpdemo.world.launch import end

for package in ("lightning", "tensorboard"):
    if find_spec(package) is None:
        raise UserError(f"this lab needs {package}, which is not installed; pip install lightning tensorboard")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402


class Digits(pl.LightningDataModule):
    """The images: every process takes its share of each batch of `batch_size` images."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def setup(self, stage):
        s, trainer = self.settings, self.trainer
        self.dataset = data.load(s.dataset, s.data, s.image_size or 28, s.seed)
        self.batch = s.batch_size // trainer.world_size
        self.ranks = trainer.world_size, trainer.global_rank

    def train_dataloader(self):
        images = self.dataset.train
        # Lightning calls sampler.set_epoch
        sampler = DistributedSampler(images, *self.ranks, seed=self.settings.seed, drop_last=True)
        return DataLoader(images, self.batch, sampler=sampler, drop_last=True)

    def val_dataloader(self):
        images = self.dataset.validation
        return DataLoader(images, self.batch, sampler=range(self.ranks[1], len(images), self.ranks[0]))


class Story(pl.LightningModule):
    """The model, what a step computes, and what moves the weights; the trainer does the rest."""

    def __init__(self, settings):
        super().__init__()
        s = self.settings = settings
        data_shape = {"classes": 10, "channels": 1, "image_size": s.image_size or 28}
        self.model = models.build(s.model, seed=s.seed, **data_shape)

    def training_step(self, batch, number):
        images, labels = batch
        loss = loss_fn(self.model(images), labels)
        self.log("train/loss", loss)  # of this process; sync_dist=True averages
        return loss  # the trainer calls zero_grad, backward and step

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(3, dtype=torch.double, device=self.device)

    def validation_step(self, batch, number):
        images, labels = batch
        outputs = self.model(images)
        correct = count_correct(outputs, labels)
        count = torch.full_like(correct, len(labels))  # on the device, as the others
        self.sums += torch.stack([loss_fn(outputs, labels).double() * count, correct, count])

    def on_validation_epoch_end(self):
        loss, correct, count = self.trainer.strategy.reduce(self.sums, reduce_op="sum").tolist()
        self.validation = loss / count, correct / count

    def configure_optimizers(self):
        optimizer = make_optimizer(self.parameters(), self.settings)
        length = self.settings.epochs * len(self.trainer.datamodule.train_dataloader())
        scheduler = make_scheduler(optimizer, self.settings, length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Losses(pl.Callback):
    """Keeps the loss of every step on the device; `write` averages it over the processes, as our loop does."""

    def on_fit_start(self, trainer, module):
        self.rows = []

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        self.rows.append((trainer.global_step, trainer.current_epoch, outputs["loss"].detach().double()))

    def write(self, trainer, log):
        """Write one line per step; all ranks must call this."""
        losses = sum_over_ranks(torch.stack([loss for *_, loss in self.rows])) / trainer.world_size
        for (step, epoch, _), loss in zip(self.rows, losses.tolist(), strict=True):
            log.write("step", step=step, epoch=epoch, loss=loss)


def lightning_settings(**changes) -> Settings:
    """Return the settings of the story on one device; the trainer says on how many it runs."""
    return Settings(**story("single", **changes))


def make_trainer(nodes=1, devices=1, **more):
    """Return the trainer of the story: how many nodes, how many processes on each. Nothing else changes."""
    many = DDPStrategy(static_graph=True, gradient_as_bucket_view=True)
    return pl.Trainer(
        num_nodes=nodes,
        devices=devices,
        strategy=many if nodes * devices > 1 else "auto",
        **{"use_distributed_sampler": False, "num_sanity_val_steps": 0, "enable_checkpointing": False}
        | {"enable_progress_bar": False, "enable_model_summary": False}
        | more,
    )


def main(out, steps=None):
    """Train in every process; rank 0 writes ``metrics.jsonl``, ``summary.json`` and the folder ``tensorboard``."""
    world = where_am_i()
    claim_cores(world)
    settings, losses = lightning_settings(epochs=1), Losses()
    trainer = make_trainer(
        nodes=world.world_size // world.local_world_size,
        devices=world.local_world_size,
        max_epochs=settings.epochs,
        limit_train_batches=int(steps) if steps else 1.0,
        logger=TensorBoardLogger(out, name="", version="tensorboard"),
        log_every_n_steps=1,
        callbacks=[losses],
    )
    module = Story(settings)
    trainer.fit(module, datamodule=Digits(settings))
    log, (loss, accuracy) = RunLog(out, trainer.is_global_zero), module.validation
    losses.write(trainer, log)
    arguments = {"num_nodes": trainer.num_nodes, "devices": trainer.num_devices}
    log.finish(arguments | {"validation_loss": loss, "validation_accuracy": accuracy})
    if dist.is_initialized():  # see mpdemo/world/env.py: destroyed too soon after a collective, PyTorch may abort
        dist.barrier()
        time.sleep(0.1)
        dist.destroy_process_group()


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

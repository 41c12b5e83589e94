"""What a loop costs besides its work: a bare loop, this course's and Lightning's, an epoch of each alternately.

    python tests/bench/lightning_overhead.py runs/overhead

What a loop adds to a step doesn't depend on the model, so a toy with short steps shows it best. Our loop notes the
loss of every step in a file; Lightning has no logger, no checkpoints and no progress bar. A part of `make bench`.
"""

import io
import logging
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from mpdemo import data, models
from mpdemo.labs.lightning_training import Classifier, Digits, make_trainer, pl
from mpdemo.measure.compare import WARMUP, Comparison, write_result
from mpdemo.measure.paired import ROUNDS, difference, to_row
from mpdemo.run import train
from mpdemo.settings import Settings, checked
from mpdemo.world import clock
from mpdemo.world.processes import end

EPOCHS, BATCH = 60, 128  # an epoch of each loop is a round
OURS, BARE = "our training loop", "bare loop"
LIGHTNING = "PyTorch Lightning, without logger and checkpoints,"


class InTurn:
    """What our loop calls where it would validate: the others do an epoch, and every epoch's seconds are kept."""

    def __init__(self, others):
        self.others, self.begin = others, time.perf_counter()
        self.seconds = {name: [] for name in (OURS, *others)}

    def __call__(self, *_):
        self.seconds[OURS].append(time.perf_counter() - self.begin)
        for name, epoch in self.others.items():
            self.seconds[name].append(epoch())
        self.begin = time.perf_counter()
        return 0.0, 0.0  # no loop validates


class Stopwatch(pl.Callback):
    """Measures an epoch of Lightning's loop."""

    def on_train_epoch_start(self, trainer, module):
        self.begin = clock.now(module.device)

    def on_train_epoch_end(self, trainer, module):
        self.seconds = clock.now(module.device) - self.begin


def lightning_epoch(module, settings) -> float:
    """Train for one epoch with Lightning; return its seconds."""
    watch = Stopwatch()
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, logger=False, callbacks=[watch])
    trainer.fit(module, datamodule=Digits(settings.batch_size))
    return watch.seconds


def bare_epoch(model, optimizer, loader, device) -> float:
    """Train for one epoch with nothing besides it; return its seconds."""
    begin = clock.now(device)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
    return clock.now(device) - begin


def measure(world) -> dict:
    """Time epochs alternately: what each loop adds to a step of the bare one, a paired difference in seconds."""
    # else it introduces itself in each round
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="mpdemo-lightning-") as folder, redirect_stdout(io.StringIO()):
        words = {"rung": "single", "model": "toy", "batch_size": BATCH, "optimizer": "adamw"}
        settings = checked(Settings(**words, epochs=WARMUP + EPOCHS, out=folder))
        model, loaders = models.build("toy").to(world.device), data.Loaders(data.load("digits"), BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        bare = partial(bare_epoch, model, optimizer, loaders.train, world.device)
        turns = InTurn({BARE: bare, LIGHTNING: partial(lightning_epoch, Classifier(settings), settings)})
        train(settings, world, validate=turns)
    steps = loaders.steps_per_epoch
    seconds = {name: [epoch / steps for epoch in epochs[WARMUP:]] for name, epochs in turns.seconds.items()}
    comparison = Comparison(world)
    comparison.add("course", Settings(rung="single", epochs=1))
    comparison.run(ROUNDS, warmup=1)
    return {
        "added": {
            name: to_row("seconds", difference(seconds[name], seconds[BARE])) for name in (LIGHTNING, OURS)
        },
        "step_seconds": {name: median(values) for name, values in seconds.items()},
        "course_seconds": comparison.median("course"),
    }


if __name__ == "__main__":
    end(write_result(sys.argv[1], measure))

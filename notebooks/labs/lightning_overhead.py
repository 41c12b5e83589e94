"""What a loop costs beside its work: a bare loop, this course's and Lightning's, an epoch of each alternately.

    python -m mpdemo.labs.lightning_overhead runs/12_overhead

What a loop adds to a step doesn't depend on the model, so a toy with short steps shows it best. Our loop notes the
loss of every step in a file; Lightning has no logger, no checkpoints and no progress bar. Taught in
notebooks/12_other_tools.ipynb, and a part of ``python -m mpdemo bench``.
"""

import io
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from mpdemo import data, models
from mpdemo.compare import WARMUP, Comparison, quartiles, write_result
from mpdemo.errors import RunFailed
from mpdemo.labs.lightning_training import Digits, Classifier, make_trainer, pl
from mpdemo.notebook.recipe import recipe
from mpdemo.run import Run
from mpdemo.rungs import single
from mpdemo.settings import Settings, checked
from mpdemo.world.launch import end

ROUNDS, BATCH = 60, 128
OURS, BARE, LIGHTNING = "our loop", "bare loop", "Lightning"
PATIENCE = 120  # s for an epoch of Lightning's, which takes less than one


class InTurn(Run):
    """Our loop; after each of its epochs the others do one, and every epoch's seconds are kept."""

    def validate(self):
        self.validation = 0.0, 0.0  # no loop validates
        return self.validation

    def one_epoch(self):
        begin = time.perf_counter()
        yield from super().one_epoch()
        self.seconds[OURS].append(time.perf_counter() - begin)
        for name, epoch in self.others.items():
            begin = time.perf_counter()
            epoch()
            self.seconds[name].append(time.perf_counter() - begin)


class WhenCalled(pl.Callback):
    """Lightning's loop in a thread, which does an epoch for each call of `epoch`."""

    def __init__(self, settings):
        self.settings, self.turn, self.ready = settings, threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self.fit, daemon=True).start()
        self.wait()

    def fit(self):
        torch.set_num_threads(1)
        s = self.settings
        trainer = make_trainer(max_epochs=s.epochs, limit_val_batches=0, logger=False, callbacks=[self])
        trainer.fit(Classifier(s), datamodule=Digits(s.batch_size))

    def on_train_epoch_start(self, trainer, module):
        self.ready.release()
        self.turn.acquire()

    def on_train_end(self, trainer, module):
        self.ready.release()

    def epoch(self):
        self.turn.release()
        self.wait()

    def wait(self):
        if not self.ready.acquire(timeout=PATIENCE):
            raise RunFailed(f"Lightning's loop took more than {PATIENCE} s for an epoch; see its message above")


def bare_loop(settings):
    """Return a function that trains a model for one epoch, with nothing beside it."""
    model, loaders = models.build(settings.model), data.Loaders(data.load("digits"), settings.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def epoch():
        for images, labels in loaders.train:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    return epoch


def measure(world, rounds=ROUNDS) -> dict:
    """Time epochs alternately: seconds of a step, and what each loop adds to the bare one's of the same round."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-lightning-") as folder, redirect_stdout(io.StringIO()):
        words = {"rung": "single", "model": "toy", "batch_size": BATCH, "optimizer": "adamw"}
        settings = checked(Settings(**words, epochs=WARMUP + rounds, out=folder))
        run = InTurn(settings, world)
        run.others = {BARE: bare_loop(settings), LIGHTNING: WhenCalled(settings).epoch}
        run.seconds = {name: [] for name in (OURS, BARE, LIGHTNING)}
        single.train(run)
        steps = run.loaders.steps_per_epoch
    seconds = {name: [epoch / steps for epoch in epochs[WARMUP:]] for name, epochs in run.seconds.items()}
    added = {name: [a - b for a, b in zip(seconds[name], seconds[BARE], strict=True)] for name in (LIGHTNING, OURS)}
    comparison = Comparison(world)
    comparison.add("course", Settings(**recipe("single", epochs=1)))
    comparison.run(5, warmup=1)
    return {
        "step_seconds": {name: median(values) for name, values in seconds.items()},
        "added_seconds": {name: median(values) for name, values in added.items()},
        "added_quartiles": {name: quartiles(values) for name, values in added.items()},
        "course_seconds": comparison.median("course"),
        "rounds": rounds,
    }


if __name__ == "__main__":
    end(write_result(sys.argv[1], lambda world: measure(world, *map(int, sys.argv[2:]))))

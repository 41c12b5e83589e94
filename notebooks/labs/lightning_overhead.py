"""What a loop costs beside its work: a bare loop, this course's and Lightning's, an epoch of each alternately.

    python -m mpdemo.labs.lightning_overhead runs/12_overhead

What a loop adds to a step doesn't depend on the model, so a toy with short steps shows it best. Our loop notes the
loss of every step in a file; Lightning has no logger, no checkpoints and no progress bar. Taught in
notebooks/12_other_tools.ipynb, and a part of ``python -m mpdemo bench``.
"""

import copy
import sys
import tempfile
import time
from contextlib import redirect_stdout
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from mpdemo import data
from mpdemo.compare import WARMUP, Comparison, quartiles, write_result
from mpdemo.labs.lightning_story import Digits, Story, make_trainer, pl
from mpdemo.notebook.story import story
from mpdemo.settings import Settings, checked
from mpdemo.training.build import build
from mpdemo.training.loop import Run
from mpdemo.world.launch import end

ROUNDS = 60
NAMES = ("Lightning", "our loop", "bare loop")


class InTurn(pl.Callback):
    """After every epoch of Lightning's: an epoch of each of the others."""

    def __init__(self, others):
        self.others, self.seconds = others, {name: [] for name in NAMES}

    def on_train_epoch_start(self, trainer, module):
        self.begin = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        self.seconds["Lightning"].append(time.perf_counter() - self.begin)
        for name, epoch in self.others.items():
            begin = time.perf_counter()
            epoch()
            self.seconds[name].append(time.perf_counter() - begin)


def bare_loop(dataset, model, batch_size):
    """Return a function that trains a copy of the model for one epoch, with nothing beside it."""
    model, loaders = copy.deepcopy(model), data.Loaders(dataset, batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def epoch():
        for images, labels in loaders.train:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    return epoch


def measure(world, rounds=ROUNDS, model="toy") -> dict:
    """Time epochs alternately: seconds of a step, and what each loop adds to the bare one's of the same round."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-lightning-") as folder:
        words = {"rung": "single", "model": model, "optimizer": "adamw", "epochs": 10_000, "image_size": 28}
        settings = checked(Settings(**words, out=folder))
        dataset, rung, optimizer = build(settings, world)
        run = Run(settings, world, rung, optimizer, data.Loaders(dataset, settings.batch_size))
        run.validate = lambda: (0.0, 0.0)  # no loop validates
        run.start_bar(disable=True)
        bare = bare_loop(dataset, rung.model, settings.batch_size)
        in_turn = InTurn({"our loop": run.one_epoch, "bare loop": bare})
        options = {"max_epochs": WARMUP + rounds, "limit_val_batches": 0, "logger": False, "callbacks": [in_turn]}
        with redirect_stdout(None):  # our loop prints a line per epoch
            make_trainer(**options).fit(Story(settings), datamodule=Digits(settings.batch_size))
        run.log.file.close()
        steps = run.loaders.steps_per_epoch
    seconds = {name: [epoch / steps for epoch in epochs[WARMUP:]] for name, epochs in in_turn.seconds.items()}
    added = {name: [a - b for a, b in zip(seconds[name], seconds["bare loop"], strict=True)] for name in NAMES[:2]}
    comparison = Comparison(world)
    comparison.add("story", Settings(**story("single", epochs=1)))
    comparison.run(5, warmup=1)
    return {
        "step_seconds": {name: median(values) for name, values in seconds.items()},
        "added_seconds": {name: median(values) for name, values in added.items()},
        "added_quartiles": {name: quartiles(values) for name, values in added.items()},
        "story_seconds": comparison.median("story"),
        "rounds": rounds,
    }


def main(out, rounds=ROUNDS):
    """Measure in one process and write the result."""
    write_result(out, lambda world: measure(world, int(rounds)))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

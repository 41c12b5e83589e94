"""What a step costs beside its work: a bare loop, this course's loop and Lightning's, an epoch of each in turn.

    python -m mpdemo.labs.lightning_overhead runs/12_overhead

What a loop adds to a step does not depend on the model, so a toy with short steps shows it best. Our loop notes the
loss of every step in a file; Lightning has no logger, no checkpoints and no progress bar. Taught in
notebooks/12_other_tools.ipynb.
"""

import sys
import tempfile
import time
from contextlib import redirect_stdout
from statistics import median

from mpdemo import data
from mpdemo.compare import WARMUP, Comparison, quartiles, write_result
from mpdemo.labs.bare_loop import bare_epoch
from mpdemo.labs.lightning_story import Digits, Story, lightning_settings, make_trainer, pl
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


def measure(world, rounds=ROUNDS, model="toy") -> dict:
    """Time epochs in turn.

    Returns
    -------
    dict
        ``step_seconds`` (name -> median), ``added_seconds`` and ``added_quartiles`` (per step, over the bare loop of
        the same round), and ``story_seconds``, a step of the story's model.
    """
    with tempfile.TemporaryDirectory(prefix="mpdemo-lightning-") as folder:
        settings = checked(Settings(rung="single", model=model, epochs=10_000, image_size=28, out=folder))
        dataset, rung, optimizer = build(settings, world)
        run = Run(settings, world, rung, optimizer, data.Loaders(dataset, settings.batch_size))
        run.validate = lambda: (0.0, 0.0)  # no loop validates
        run.start_bar(disable=True)
        in_turn = InTurn({"our loop": run.one_epoch, "bare loop": bare_epoch(dataset, rung.model, settings)})
        options = {
            "max_epochs": WARMUP + rounds,
            "limit_val_batches": 0,
            "logger": False,
            "callbacks": [in_turn],
        }
        with redirect_stdout(None):  # our loop prints a line per epoch
            make_trainer(**options).fit(Story(settings), datamodule=Digits(settings))
        run.log.file.close()
        steps = run.loaders.steps_per_epoch
    seconds = {name: [epoch / steps for epoch in epochs[WARMUP:]] for name, epochs in in_turn.seconds.items()}
    bare = seconds["bare loop"]
    added = {name: [a - b for a, b in zip(seconds[name], bare, strict=True)] for name in NAMES[:2]}
    return {
        "step_seconds": {name: median(values) for name, values in seconds.items()},
        "added_seconds": {name: median(values) for name, values in added.items()},
        "added_quartiles": {name: quartiles(values) for name, values in added.items()},
        "story_seconds": story_seconds(world),
        "rounds": rounds,
    }


def story_seconds(world, steps=5) -> float:
    """Return the median time of a step of the story, in s."""
    comparison = Comparison(world)
    comparison.add("story", lightning_settings(epochs=1))
    comparison.run(steps, warmup=1)
    return comparison.median("story")


def main(out, rounds=ROUNDS):
    """Measure in one process and write the result."""
    write_result(out, lambda world: measure(world, int(rounds)))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

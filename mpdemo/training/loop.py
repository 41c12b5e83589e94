"""The one training loop: every rung, every model, every data set goes through here.

The loop owns the data, the optimizer, the clock and the run's folder; the rung (mpdemo/parallel) computes gradients.
Taught in notebooks/01_single_device.ipynb. The launch lines of every rung stand in command.py.
"""

import itertools
import math
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

from mpdemo import data
from mpdemo.errors import RunFailed
from mpdemo.training import checkpoint
from mpdemo.training.build import build, make_scheduler
from mpdemo.training.measure import Steps, peak_memory_of_all
from mpdemo.training.resume import check_settings, folder_to_resume, read_newest, restore
from mpdemo.training.run_log import open_log
from mpdemo.training.stop_signal import StopSignal
from mpdemo.training.summary import summarise
from mpdemo.world.collectives import sum_over_ranks

STOPPED = 3  # exit status: stopped by a signal, a checkpoint is written


def train(settings, world) -> int:
    """Train one run from its settings to its summary.

    Parameters
    ----------
    settings : Settings
        Checked (`mpdemo.settings.checked`).
    world : World

    Returns
    -------
    int
        Exit status: 0 done, 3 stopped with a checkpoint.

    Raises
    ------
    UserError
        The settings do not go with the data, or with the checkpoint from which the run is to go on.
    RunFailed
        The loss is not finite, or the checkpoint of a run that is stopped cannot be written.
    """
    dataset, rung, optimizer = build(settings, world)
    loaders = data.Loaders(
        dataset,
        settings.batch_size,
        rung.replicas,
        rung.replica,
        settings.seed,
        settings.workers,
        pin_memory=world.device.type == "cuda",
        images=rung.has_input,
        device=world.device,
    )
    # fp16 leaves out a step whose scaled loss overflows, often the first; PyTorch then warns of the wrong order
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    return Run(settings, world, rung, optimizer, loaders).go()


class Run:
    """One training under way: where it is (epoch, step) and what it writes."""

    def __init__(self, settings, world, rung, optimizer, loaders):
        self.settings, self.world, self.rung = settings, world, rung
        self.optimizer, self.loaders = optimizer, loaders
        self.epoch = self.step = 0
        self.epoch_steps = []  # (loss, right answers, seconds) of every step of this epoch so far
        self.validation = None  # loss and accuracy of the last validation
        # all steps of the training, and where this run ends: --steps 20 --epochs 4 is the beginning of --epochs 4
        self.length = settings.epochs * loaders.steps_per_epoch if settings.epochs else settings.steps
        self.last_step = min(settings.steps or self.length, self.length)
        self.scheduler = make_scheduler(optimizer, settings, self.length)
        self.folder = Path(settings.out)
        resume = folder_to_resume(settings)
        if resume:
            state = read_newest(resume, world.rank, world.world_size)
            check_settings(state, settings, self.length)
            restore(state, rung, optimizer, self.scheduler, world.rank)
            self.epoch, self.step, self.epoch_steps = state["epoch"], state["step"], state["epoch_steps"]
        same = resume and resume.resolve() == self.folder.resolve()
        self.log = open_log(self, resumed=(self.epoch, self.step) if same else None)
        self.stop_signal = StopSignal(world, settings.log_every)

    def go(self) -> int:
        """Train epoch after epoch; return the exit status."""
        begin, stopped = time.time(), False
        source = {"resume": self.settings.resume} if self.settings.resume else {}
        self.log.write("start", step=self.step, steps=self.last_step, time=round(begin, 4), **source)
        with self.start_bar(disable=True if self.world.rank > 0 else None):
            # a run that is resumed from its last step has its last validation still to do
            while not stopped and (self.step < self.last_step or self.validation is None):
                stopped = self.one_epoch()
        if self.rung.recorder:
            self.rung.recorder.save(self.folder)
        self.log.finish(summarise(self, time.time() - begin, stopped))
        return STOPPED if stopped else 0

    def start_bar(self, disable):
        """Show progress; `disable` None leaves the bar out of a log file."""
        self.bar = tqdm(total=self.last_step, initial=self.step, desc=self.settings.rung, unit="step", disable=disable)
        return self.bar

    def one_epoch(self) -> bool:
        """Train one epoch, or what is left of it; return whether a signal stopped it."""
        done = self.step - self.epoch * self.loaders.steps_per_epoch  # above 0 in a resumed run
        self.loaders.start_epoch(self.epoch, done)
        self.rung.train()
        self.steps, self.epoch_steps = Steps(self.rung.replicas), self.epoch_steps if done else []
        left = min(self.loaders.steps_per_epoch - done, self.last_step - self.step)
        for images, labels in itertools.islice(self.loaders.train, max(0, left)):
            self.optimizer.zero_grad()
            with self.rung.recorder.step() if self.rung.recorder else nullcontext():
                loss, correct = self.rung.step(images, labels)
            self.rung.scaler.step(self.optimizer)
            self.rung.scaler.update()
            self.scheduler.step()  # the learning rate of the next step
            self.steps.add(loss, correct)
            self.step += 1
            if self.step == 1 or self.step % self.settings.log_every == 0:
                self._flush()
            if self._checkpoint_if_due():
                return True
        self._flush()
        return self._finish_epoch()

    def _flush(self):
        """Fetch the losses kept on the device and write one line per step, the last one with the memory."""
        rows, seconds = self.steps.flush()
        batch, now, first = self.settings.batch_size, time.time(), self.step - len(rows) + 1
        for number, (loss, correct) in enumerate(rows, first):
            if not (math.isfinite(loss) or self.rung.scaler.is_enabled()):  # the scaler leaves such a step out
                lr = self.settings.lr
                raise RunFailed(f"the loss is {loss} at step {number}: the training diverged; lower --lr {lr}")
            rate = round(batch / seconds, 2)
            when = round(now - (self.step - number) * seconds, 4)
            line = {"step": number, "epoch": self.epoch, "loss": loss, "images_per_second": rate, "time": when}
            if number == self.step:
                line["peak_memory_mib"] = peak_memory_of_all(self.world, self.rung.devices)
            self.log.write("step", **line)
            self.epoch_steps.append((loss, correct, seconds))
        if rows:
            self.bar.update(self.step - self.bar.n)
            self.bar.set_postfix(loss=f"{rows[-1][0]:.4f}", refresh=False)

    def _checkpoint_if_due(self) -> bool:
        """Write a checkpoint where one is due or a signal came; return whether to stop. All ranks decide alike."""
        every = self.settings.checkpoint_every
        stop = self.stop_signal.seen()
        if stop or (every and self.step % every == 0):
            self._flush()
            self._save(stop)
            self.steps.restart_clock()
        return stop

    def _save(self, stop):
        """Write a checkpoint of where the run is now; at the end of an epoch its validation is still to come.

        A run that goes on does so without it: the disk may have room again at the next.
        """
        try:
            checkpoint.save(self, self.folder / "checkpoints")
        except RunFailed as error:
            if stop:
                raise
            if self.world.rank == 0:
                print(f"mpdemo: {error}", file=sys.stderr)

    def _finish_epoch(self) -> bool:
        """Validate and write the epoch's line; return whether a signal stopped it."""
        if not (result := self.validate()):
            self._save(stop=True)
            return True
        loss, accuracy = result
        count = max(1, len(self.epoch_steps) * self.settings.batch_size)
        seconds = sum(row[2] for row in self.epoch_steps)
        self.log.write(
            "epoch",
            epoch=self.epoch,
            step=self.step,
            train_loss=sum(row[0] for row in self.epoch_steps) / max(1, len(self.epoch_steps)),
            train_accuracy=sum(row[1] for row in self.epoch_steps) / count,
            validation_loss=loss,
            validation_accuracy=accuracy,
            images_per_second=round(len(self.epoch_steps) * self.settings.batch_size / seconds, 2) if seconds else None,
            time=round(time.time(), 4),
        )
        if self.world.rank == 0:
            self.bar.write(
                f"epoch {self.epoch + 1}: step {self.step}, validation loss {loss:.4f}, accuracy {accuracy:.1%}"
            )
        self.epoch += 1
        return False

    def validate(self) -> tuple[float, float] | None:
        """Return mean loss and accuracy over every validation image, once, over all ranks; None after a signal."""
        self.rung.synchronise()
        self.rung.train(False)
        sums = torch.zeros(3, dtype=torch.double, device=self.world.device)
        for images, labels in self.loaders.validation:
            loss, correct = self.rung.evaluate(images, labels)
            count = torch.full_like(correct, len(labels) if self.rung.has_output else 0)
            sums += torch.stack([loss.double(), correct.double(), count.double()]).to(sums.device)
            if self.stop_signal.seen():  # a validation may take longer than is left
                return None
        loss, correct, count = sum_over_ranks(sums).tolist()
        self.validation = loss / count, correct / count
        return self.validation

"""Where a training run is, and how it is saved and resumed from there.

Taught in notebooks/01_single_device.ipynb and 10_checkpoint.ipynb.
"""

from pathlib import Path

from mpdemo.errors import RunFailed, UserError
from mpdemo.options import option_name
from mpdemo.training import checkpoint
from mpdemo.training.log import rows_in
from mpdemo.world.collectives import place
from mpdemo.world.say import log

# settings that a resumed run must keep
SAME = ["model", "norm", "dataset", "image_size", "batch_size", "seed"]
SAME += ["optimizer", "lr", "warmup_steps", "lr_schedule"]


class Progress:
    """Where a training run is: epochs and steps, counted from its start."""

    def __init__(self, settings, steps_per_epoch):
        self.steps_per_epoch = steps_per_epoch
        # all steps of the training, and where this run ends: --steps 20 --epochs 4 is the beginning of --epochs 4
        self.length = settings.epochs * steps_per_epoch if settings.epochs else settings.steps
        self.last_step = min(settings.steps or self.length, self.length)
        self.epoch = 0
        self.step = 0
        self.epoch_steps = []  # (loss, correct predictions, seconds) of every step of this epoch so far
        self.loss = None  # of the last step
        self.validation = None  # loss and accuracy of the last one

    @property
    def unfinished(self) -> bool:
        """Whether there is something to do; a run resumed from its last step has its last validation still to do."""
        return self.step < self.last_step or self.validation is None

    @property
    def done(self) -> int:
        """Steps of this epoch that are done: above 0 at its beginning where the run is resumed."""
        return self.step - self.epoch * self.steps_per_epoch

    @property
    def left(self) -> int:
        """Steps of this epoch that are still to do."""
        return max(0, min(self.steps_per_epoch - self.done, self.last_step - self.step))

    def end_epoch(self, validation):
        """Count an epoch, and keep its validation."""
        self.epoch += 1
        self.epoch_steps = []
        self.validation = validation


class Checkpoints:
    """The checkpoints of a run: when one is due, what is in it besides tensors, and which training may resume it."""

    def __init__(self, settings, rung, progress, rates):
        self.s, self.rung, self.progress, self.rates = settings, rung, progress, rates
        self.folder = Path(settings.out)

    def due(self) -> bool:
        """Whether the settings ask for a checkpoint after this step."""
        return bool(self.s.checkpoint_every) and self.progress.step % self.s.checkpoint_every == 0

    def save(self, must):
        """Write one of the run as it is now; if the disk is full, only a run that must have it fails."""
        self.rung.agree_on_buffers()
        state = {name: getattr(self.progress, name) for name in ("length", "epoch", "epoch_steps", "step")}
        state["scheduler"] = self.rates.state_dict()
        state["settings"] = {name: getattr(self.s, name) for name in SAME}
        try:
            checkpoint.save(self.folder / "checkpoints", self.rung.model, self.rung.optimizer, state)
        except RunFailed as error:
            if must:
                raise
            if place()[0] == 0:
                log.warning("%s", error)

    def resume(self) -> bool:
        """Go to the newest checkpoint of the run that the settings name; return whether it is this run's own."""
        try:
            before = self.folder_to_resume()
            if before is None:
                return False
            self.restore(before)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}; choose another folder") from None
        return before.resolve() == self.folder.resolve()

    def folder_to_resume(self) -> Path | None:
        """Return the run folder to resume, None for a new run.

        With ``--resume auto`` the same command starts a run and resumes it, as a job that is queued again needs. A run
        that would write into the folder of another one that has checkpoints, and so remove them, is refused.
        """
        out, resume = self.folder, self.s.resume
        saved = checkpoint.in_order(out / "checkpoints")
        if resume == "auto":
            return out if saved else None
        began_from = next((row.get("resume") for row in rows_in(out) if row.get("event") == "start"), None)
        if saved and not (resume and (Path(resume).resolve() == out.resolve() or began_from == resume)):
            raise UserError(f"{out} holds the checkpoints of a run; give --resume {out} or auto, or another --out")
        return Path(resume) if resume else None

    def restore(self, folder):
        """Resume the newest checkpoint of a run's folder, whatever rung wrote it; refuse another training's."""
        state = checkpoint.read_newest(folder)
        progress = self.progress
        for name in SAME:  # a checkpoint of an older version may also name settings that are gone
            value = getattr(self.s, name)
            if (saved := state["settings"].get(name, value)) != value:
                option = f"{option_name(name)} {saved}"
                raise UserError(f"the checkpoint is of a run with {option}, not {value}; give {option}")
        if self.s.lr_schedule == "cosine" and state["length"] != progress.length:
            what = f"the checkpoint's cosine ends after {state['length']} steps, not {progress.length}"
            raise UserError(f"{what}; give the run's own --epochs, and --steps to end it earlier")
        checkpoint.restore(state, self.rung.model, self.rung.optimizer)
        progress.epoch = state["epoch"]
        progress.step = state["step"]
        progress.epoch_steps = state["epoch_steps"]
        progress.loss = progress.epoch_steps[-1][0] if progress.epoch_steps else None
        self.rates.load_state_dict(state["scheduler"])
        for group, lr in zip(self.rung.optimizer.param_groups, self.rates.get_last_lr(), strict=True):
            group["lr"] = lr

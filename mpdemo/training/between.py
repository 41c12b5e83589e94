"""What a run does between two batches: count, write lines, validate, save, resume, stop.

Taught in notebooks/01_single_device.ipynb and 09_checkpoint.ipynb.
"""

import itertools
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from mpdemo import data
from mpdemo.errors import RunFailed, UserError
from mpdemo.options import option_name
from mpdemo.training import checkpoint
from mpdemo.training.busy import Busy, profiler
from mpdemo.training.log import RunLog, TensorBoardLog, folder_to_resume, rows_in
from mpdemo.training.meter import Steps, of_all, peak_memory_mib
from mpdemo.world.collectives import StopSignal, sum_over_ranks

STOPPED = 3  # exit status: stopped by a signal, a checkpoint is written
# settings that a resumed run must keep
SAME = ["model", "norm", "dataset", "image_size", "batch_size", "seed"]
SAME += ["optimizer", "lr", "warmup_steps", "lr_schedule"]


class Between:
    """The part of `mpdemo.run.Run` that no rung calls: it runs while the rung waits for its next batch."""

    def begin(self, model, optimizer, replicas, replica, group, images):
        """Make the loaders and the learning-rate schedule, restore a checkpoint, open the log, compile."""
        s, self.held, self.optimizer_, self.group = self.s, model, optimizer, group
        self.replicas, self.replica = replicas, replica
        where = {"device": self.device, "images": images}
        self.loaders = data.Loaders(self.dataset, s.batch_size, replicas, replica, s.seed, s.workers, **where)
        # all steps of the training, and where this run ends: --steps 20 --epochs 4 is the beginning of --epochs 4
        self.length = s.epochs * self.loaders.steps_per_epoch if s.epochs else s.steps
        self.last_step = min(s.steps or self.length, self.length)
        self.scheduler = self.learning_rate(optimizer, s, self.length)
        self.folder = Path(s.out)
        try:
            if before := folder_to_resume(s):
                self.restore(before)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}; choose another folder") from None
        same = before and before.resolve() == self.folder.resolve()
        self.lines = RunLog(self.folder, self.rank == 0, (self.epoch, self.steps_done) if same else None)
        if s.tensorboard and self.rank == 0:
            rows, factor = rows_in(self.folder) if same else None, self.scheduler.lr_lambdas[0]
            self.lines.board = TensorBoardLog(self.folder, lambda step: s.lr * factor(step - 1), rows)
        if s.compile:
            compile_blocks(model)
        self.stop_signal = StopSignal(self.device, s.log_every)
        self.busy, self.profiler = Busy(self), profiler(self) if s.profile else None

    def one_epoch(self):
        """Yield the batches of an epoch, or of what is left of it; then validate."""
        done = self.steps_done - self.epoch * self.loaders.steps_per_epoch  # above 0 in a resumed run
        self.loaders.start_epoch(self.epoch, done)
        self.held.train()
        self.results, self.epoch_steps = Steps(self.device, self.replicas), self.epoch_steps if done else []
        left = min(self.loaders.steps_per_epoch - done, self.last_step - self.steps_done)
        for images, labels in itertools.islice(self.loaders.train, max(0, left)):
            if self.recorder:
                self.recorder.begin_step()
            yield self.to_device(images), self.to_device(labels)  # the rung computes the step
            if self.recorder:
                self.recorder.end_step()
            if self.profiler:
                self.profiler.step()
            self.end_step()
            if self.status:
                return
        self.flush()
        self.finish_epoch()

    def to_device(self, tensor):
        """Copy a tensor to this process's device, without waiting for the copy."""
        return tensor.to(self.device, non_blocking=True)

    def end_step(self):
        """Count a step; write its line, and a checkpoint, where they are due."""
        self.scheduler.step()  # the learning rate of the next step
        self.results.end_step()
        self.steps_done += 1
        stop = self.stop_signal.seen()  # all ranks decide alike
        save = stop or (self.s.checkpoint_every and self.steps_done % self.s.checkpoint_every == 0)
        if save or self.steps_done == 1 or self.steps_done % self.s.log_every == 0:
            self.flush()
        if save:
            self.save(stop)
            self.results.restart_clock()

    def flush(self):
        """Fetch the losses kept on the device and write one line per step, the last one with the memory."""
        rows, seconds = self.results.flush()
        now, first = time.time(), self.steps_done - len(rows) + 1
        for number, (loss, correct) in enumerate(rows, first):
            if not math.isfinite(loss):
                raise RunFailed(f"the loss is {loss} at step {number}: the training diverged; lower --lr {self.s.lr}")
            rate, when = round(self.s.batch_size / seconds, 2), round(now - (self.steps_done - number) * seconds, 4)
            line = {"step": number, "epoch": self.epoch, "loss": loss, "images_per_second": rate, "time": when}
            if number == self.steps_done:
                memory, utilisation = of_all(self, peak_memory_mib(self.devices), self.busy.utilisation())
                line["peak_memory_mib"] = [round(mib, 1) for mib in memory]
                if self.rank == 0 and number > 1:  # the first step warms up
                    line |= self.busy.line(utilisation, seconds)
            self.lines.write("step", **line)
            self.epoch_steps.append((loss, correct, seconds))
        if rows:
            self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self.bar.update(len(rows))

    def agree_on_buffers(self):
        """Give every replica the first one's buffers (batch norm's), before they are used or saved."""
        for buffer in self.held.buffers() if self.replicas > 1 else ():
            dist.broadcast(buffer, group=self.group, group_src=0)

    def save(self, stop=False):
        """Write a checkpoint of the run as it is now; if the disk is full, only a run that is stopping fails."""
        self.status = STOPPED if stop else self.status
        self.agree_on_buffers()
        state = {name: getattr(self, name) for name in ("length", "epoch", "epoch_steps")}
        state |= {"step": self.steps_done, "scheduler": self.scheduler.state_dict()}
        state |= {"settings": {name: getattr(self.s, name) for name in SAME}}
        try:
            checkpoint.save(self.folder / "checkpoints", self.held, self.optimizer_, state)
        except RunFailed as error:
            if stop:
                raise
            if self.rank == 0:
                print(f"mpdemo: {error}", file=sys.stderr)

    def restore(self, folder):
        """Resume the newest checkpoint of a run's folder, whatever rung wrote it; refuse another training's."""
        state = checkpoint.read_newest(folder)
        for name, saved in state["settings"].items():
            if (value := getattr(self.s, name)) != saved:
                option = f"{option_name(name)} {saved}"
                raise UserError(f"the checkpoint is of a run with {option}, not {value}; give {option}")
        if self.s.lr_schedule == "cosine" and state["length"] != self.length:
            what = f"the checkpoint's cosine ends after {state['length']} steps, not {self.length}"
            raise UserError(f"{what}; give the run's own --epochs, and --steps to end it earlier")
        checkpoint.restore(state, self.held, self.optimizer_)
        self.epoch, self.steps_done, self.epoch_steps = state["epoch"], state["step"], state["epoch_steps"]
        self.scheduler.load_state_dict(state["scheduler"])
        for group, lr in zip(self.optimizer_.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr

    def finish_epoch(self):
        """Validate and write the epoch's line, or a checkpoint where a signal came."""
        if not (result := self.validate()):
            self.save(stop=True)
            return
        loss, correct, seconds = (sum(row) / len(row) for row in zip(*self.epoch_steps, strict=True))
        line = {"epoch": self.epoch, "step": self.steps_done, "train_loss": loss}
        line["train_accuracy"] = correct / self.s.batch_size
        line["validation_loss"], line["validation_accuracy"] = result
        rate = round(self.s.batch_size / seconds, 2)
        self.lines.write("epoch", **line, images_per_second=rate, time=round(time.time(), 4))
        if self.rank == 0:
            said = f"validation loss {result[0]:.4f}, accuracy {result[1]:.1%}"
            self.bar.write(f"epoch {self.epoch + 1}: step {self.steps_done}, {said}")
        self.epoch += 1

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # training steps all have one shape; these have others
    def validate(self):
        """Return mean loss and accuracy over every validation image, once, over all ranks; None after a signal."""
        self.agree_on_buffers()
        self.held.eval()
        sums = torch.zeros(3, dtype=torch.double, device=self.device)
        for images, labels in self.loaders.validation:
            outputs, labels = self.evaluate(self.to_device(images)), self.to_device(labels)
            if outputs is not None and self.counts:
                labels = labels.to(outputs.device)
                correct, count = (outputs.argmax(1) == labels).sum(), torch.ones_like(labels).sum()
                loss = cross_entropy(outputs, labels) * len(labels)
                sums += torch.stack([loss.double(), correct.double(), count.double()]).to(sums.device)
            if self.stop_signal.seen():  # a validation may take longer than is left
                return None
        for module in self.held.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # with --reshard never it would wait for a backward pass
        loss, correct, count = sum_over_ranks(sums).tolist()
        self.validation = loss / count, correct / count
        return self.validation


def compile_blocks(model):
    """Let the first step compile every block, since wrappers are then in place; equal blocks share their code."""
    torch._inductor.config.compile_threads = 1  # a rank has one core
    torch._dynamo.config.recompile_limit = 64  # the blocks of a ResNet differ
    for block in model.blocks():
        block.compile()

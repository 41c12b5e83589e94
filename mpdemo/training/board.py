"""The metrics of a run for TensorBoard: the scalars of ``metrics.jsonl``, and the settings as hyperparameters.

Taught in notebooks/12_other_tools.ipynb. Source: https://docs.pytorch.org/docs/stable/tensorboard.html.
"""

import contextlib
import importlib.util
import shutil
import sys
import threading

from mpdemo.errors import UserError

STEP = {"loss": "train/loss", "images_per_second": "train/images_per_second"}  # name in metrics.jsonl -> tag
EPOCH = {"validation_loss": "validation/loss", "validation_accuracy": "validation/accuracy"}
RATE = "train/learning_rate"
FLUSH = 10  # seconds after which a scalar is in the file at the latest


def check_tensorboard():
    """Refuse --tensorboard where the package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--tensorboard needs the package tensorboard, which is not installed; pip install tensorboard, or leave "
            "it out: metrics.jsonl holds the same numbers"
        )


def tell_full_disk(failed, otherwise=threading.excepthook):
    """Say in one line that a thread of TensorBoard's cannot write any more; the run continues."""
    if issubclass(failed.exc_type, OSError):
        print(f"mpdemo: --tensorboard ends here: {failed.exc_value.strerror}; the run continues", file=sys.stderr)
    else:
        otherwise(failed)


class TensorBoardLog:
    """The folder ``tensorboard`` of a run. Every scalar stands at its step and at the time of its line in the metrics.

    `learning_rate` takes a step, counted from 1. A resumed run's `rows` of ``metrics.jsonl`` are written anew, and what
    stood there before is hidden (``purge_step``), so every step is there once, even if the run before was killed.
    """

    def __init__(self, folder, settings, learning_rate, rows=None):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.learning_rate, path = learning_rate, folder / "tensorboard"
        if rows is None and path.exists():  # like metrics.previous.jsonl
            shutil.rmtree(folder / "tensorboard.previous", ignore_errors=True)
            path.replace(folder / "tensorboard.previous")
        threading.excepthook = tell_full_disk
        self.writer = SummaryWriter(path, purge_step=None if rows is None else 0, flush_secs=FLUSH)
        values = {name: value for name, value in settings.as_dict().items() if value is not None}
        # SummaryWriter.add_hparams would make a folder of its own for them
        *begin, self.end = hparams(values, dict.fromkeys([*STEP.values(), *EPOCH.values()]))
        for summary in begin:
            self.writer.file_writer.add_summary(summary)
        for row in rows or []:
            self.write(**row)

    def write(self, event, **values):
        """Write the scalars of one line of the metrics."""
        tags = {"step": STEP, "epoch": EPOCH}.get(event, {})
        scalars = {tag: values[name] for name, tag in tags.items()}
        if event == "step":
            scalars[RATE] = self.learning_rate(values["step"])
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, values["step"], walltime=values["time"])

    def close(self):
        """Write what is left; on a full disk it is lost, and the run continues."""
        with contextlib.suppress(OSError):
            self.writer.file_writer.add_summary(self.end)
            self.writer.close()

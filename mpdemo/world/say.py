"""What a process says about its own training, on stderr, with its rank in front where a launcher gave it one.

>>> log.warning("resumes the checkpoint before it: %s", path)
mpdemo: rank 1: resumes the checkpoint before it: runs/ddp/checkpoints/step-000004
"""

import logging
import os
import sys

RANK = ("RANK", "SLURM_PROCID")  # as torchrun and srun name it
log = logging.getLogger("mpdemo")


class Formatter(logging.Formatter):
    """Write a message as ``mpdemo: rank N: text``, and without a rank where there is none."""

    def format(self, record: logging.LogRecord) -> str:
        rank = next((os.environ[name] for name in RANK if name in os.environ), None)
        place = "" if rank is None else f"rank {rank}: "
        return f"mpdemo: {place}{super().format(record)}"


class Handler(logging.StreamHandler):
    """Write to the stderr of the moment, which a cell or a test may have replaced since this module was imported."""

    stream = property(lambda _: sys.stderr, lambda *_: None)


if not log.handlers:
    log.addHandler(Handler())
    log.handlers[0].setFormatter(Formatter())
    log.setLevel(logging.INFO)
    log.propagate = False  # a reader's own logging would say it twice

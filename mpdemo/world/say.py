"""What a process says about its own training, on stderr, with its rank in front where a launcher gave it one.

>>> log.warning("%d files are not read", 5)
mpdemo: rank 1: 5 files are not read
"""

import logging
import os


def own_rank() -> str | None:
    """Return this process's rank as torchrun or srun names it, None where neither does."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID"))


def name_the_rank(record):
    """Put the rank into a message."""
    rank = own_rank()
    record.msg = f"mpdemo: {'' if rank is None else f'rank {rank}: '}{record.msg}"
    return True


log = logging.getLogger("mpdemo")
log.addFilter(name_the_rank)
# warnings, to the stderr of the moment, which a cell or a test may have replaced
log.addHandler(logging.lastResort)
log.propagate = False  # a reader's own logging would say it twice

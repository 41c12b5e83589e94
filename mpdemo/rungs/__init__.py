"""The ladder: one file per rung, as alike as can be. Read two side by side: what differs is the lesson.

Each runs as it stands (``python -m mpdemo.rungs.single``, ``torchrun --nproc-per-node 2 -m mpdemo.rungs.ddp``). Its
``build(run)`` returns model, optimizer and step, in plain PyTorch; the loop around them is `mpdemo.run.train`.
"""

import sys

from mpdemo.world.processes import prepare_signals

if sys.argv[:1] == ["-m"]:  # a rung starts: SIGUSR1, the stop signal, must not kill it during imports
    prepare_signals()

"""The ladder: one training script per rung, as alike as can be. Read two side by side: what differs is the lesson.

Each runs as it stands (``python -m mpdemo.rungs.single``, ``torchrun --nproc-per-node 2 -m mpdemo.rungs.ddp``) and owns
its loop: ``train(run)`` is plain PyTorch, `mpdemo.run.Run` brings batches, log, checkpoints and the stop signal.
"""

import sys

from mpdemo.world.processes import prepare_signals

if sys.argv[:1] == ["-m"]:  # a rung starts: SIGUSR1, the stop signal, must not kill it during imports
    prepare_signals()

"""The ladder: one file per rung, as alike as can be. Read two side by side: what differs is the lesson.

Each runs as it stands: ``torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.ddp``. Its ``build(run)`` returns
model, optimizer and step, in plain PyTorch; the loop around them is `mpdemo.run.train`.
"""

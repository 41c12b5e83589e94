"""mpdemo: one PyTorch training, taken from one device to many.

The notebooks import everything they run from here. Each rung of the ladder is a file of
``mpdemo/rungs``, a script of plain PyTorch: read two side by side and the difference is the lesson.
This module imports nothing, so that a login node without much memory can use ``mpdemo.jobs``,
``mpdemo.notebook.show``, ``mpdemo.notebook.plots`` and ``mpdemo.plan`` without loading PyTorch.
"""

__version__ = "0.1.0"

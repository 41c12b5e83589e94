"""Figures for the notebooks, drawn from result rows and small tensors; nothing trains, and PyTorch is not imported."""

from mpdemo.notebook.plots.charts import bars, curves
from mpdemo.notebook.plots.matrices import grid, matrices, messages, ring
from mpdemo.notebook.plots.timeline import timelines

__all__ = ["bars", "curves", "grid", "matrices", "messages", "ring", "timelines"]

"""Figures for the notebooks, drawn from result rows; nothing here trains, and PyTorch is not imported."""

from mpdemo.notebook.plots.charts import bars, curves
from mpdemo.notebook.plots.timeline import timelines

__all__ = ["bars", "curves", "timelines"]

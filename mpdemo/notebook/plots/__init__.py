"""Figures for the notebooks, drawn from result rows; nothing here trains, and PyTorch is not imported."""

from mpdemo.notebook.plots.buckets import buckets
from mpdemo.notebook.plots.pictures import picture
from mpdemo.notebook.plots.timeline import timeline
from mpdemo.notebook.plots.training import bars, curves, ladder

__all__ = ["bars", "buckets", "curves", "ladder", "picture", "timeline"]

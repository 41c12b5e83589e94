"""Figures for the notebooks, drawn from result rows; nothing here trains, and PyTorch is not imported."""

from mpdemo.notebook.plots.pictures import picture
from mpdemo.notebook.plots.results import bars, buckets, curves, ladder
from mpdemo.notebook.plots.timeline import timeline

__all__ = ["bars", "buckets", "curves", "ladder", "picture", "timeline"]

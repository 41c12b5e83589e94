"""Figures for the notebooks, drawn from result rows; nothing here trains, and PyTorch is not imported."""

from mpdemo.plots.buckets import buckets
from mpdemo.plots.pictures import picture
from mpdemo.plots.timeline import timeline
from mpdemo.plots.training import bars, curves, ladder

__all__ = ["bars", "buckets", "curves", "ladder", "picture", "timeline"]

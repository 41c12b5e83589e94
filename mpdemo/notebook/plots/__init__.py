"""Figures for the notebooks, drawn from result rows; nothing here trains, and PyTorch is not imported."""

from mpdemo.notebook.plots.ladder_so_far import ladder_so_far
from mpdemo.notebook.plots.results import bars, buckets, curves, ladder
from mpdemo.notebook.plots.ring import ring
from mpdemo.notebook.plots.scaling import scaling
from mpdemo.notebook.plots.step_parts import step_parts
from mpdemo.notebook.plots.timeline import timeline
from mpdemo.notebook.plots.timelines import timelines

__all__ = [
    "bars",
    "buckets",
    "curves",
    "ladder",
    "ladder_so_far",
    "ring",
    "scaling",
    "step_parts",
    "timeline",
    "timelines",
]

"""The picture of notebooks/04_model_parallel.ipynb: when each device of a split model computes."""

from mpdemo.notebook import plots
from mpdemo.timeline.read import predict


def timeline(rows):
    """Draw a measured step above the ideal one, whose operations take as long and whose messages take no time."""
    return plots.timeline(rows, predict([rows], "GPipe"))

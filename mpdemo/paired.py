"""The old name of `mpdemo.measure.paired`: a learner's own copies of the notebooks import it from here."""

from mpdemo.measure.paired import ROUNDS, Median, Ratio, difference, median, ratio  # noqa: F401

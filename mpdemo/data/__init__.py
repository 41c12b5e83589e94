"""The data: sets of images (sets.py), which rank trains on which images (sampler.py), and the batches (loaders.py)."""

from mpdemo.data.loaders import Loaders
from mpdemo.data.sets import SplitDataset, load

__all__ = ["Loaders", "SplitDataset", "load"]

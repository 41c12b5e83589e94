"""The data: sets of images (sets.py), which rank trains on which images (sampler.py), and the batches (loaders.py)."""

from mpdemo.data.datasets import SplitDataset, load
from mpdemo.data.loaders import Loaders

__all__ = ["Loaders", "SplitDataset", "load"]

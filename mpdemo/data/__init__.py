"""The data: sets of images (datasets.py), their files (images.py), batches in order (loaders.py)."""

from mpdemo.data.datasets import SplitDataset, load
from mpdemo.data.loaders import Loaders

__all__ = ["Loaders", "SplitDataset", "load"]

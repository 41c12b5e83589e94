"""The data: sets of images (sets.py), and the loaders and the sampler that share them out (loaders.py)."""

from mpdemo.data.loaders import LabelsOnly, Loaders, Sampler, labels_of
from mpdemo.data.sets import Data, PerSample, load, make_jpeg_folder

__all__ = ["Data", "LabelsOnly", "Loaders", "PerSample", "Sampler", "labels_of", "load", "make_jpeg_folder"]

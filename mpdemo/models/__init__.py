"""The models of the course: flat lists of named blocks (blocks.py); the networks are in nets.py and transformer.py."""

from mpdemo.models.blocks import Blocks
from mpdemo.models.nets import build

__all__ = ["Blocks", "build"]

"""The models of the course: flat lists of named blocks (blocks.py), and the networks written that way (nets.py)."""

from mpdemo.models.blocks import Blocks, resolve_cut
from mpdemo.models.nets import build
from mpdemo.settings import MODELS as NAMES

__all__ = ["NAMES", "Blocks", "build", "resolve_cut"]

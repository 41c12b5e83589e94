"""The models of the course: flat lists of named blocks (blocks.py), and the networks written that way (nets.py)."""

from mpdemo.cuts import resolve_cut
from mpdemo.models.blocks import Blocks
from mpdemo.models.nets import build
from mpdemo.settings import MODELS as NAMES

__all__ = ["NAMES", "Blocks", "build", "resolve_cut"]

"""The models of the course: flat lists of named blocks (blocks.py); the networks are in nets.py and transformer.py."""

from mpdemo.cuts import resolve_cut
from mpdemo.models.blocks import Blocks
from mpdemo.models.nets import build
from mpdemo.settings import MODELS as NAMES

__all__ = ["NAMES", "Blocks", "build", "resolve_cut"]

"""The old name of `mpdemo.compare`; goes when nothing imports it."""

from mpdemo.compare import *  # noqa: F403

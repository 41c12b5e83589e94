"""The old name of `mpdemo.ladder`; goes when nothing imports it."""

from mpdemo.ladder import *  # noqa: F403

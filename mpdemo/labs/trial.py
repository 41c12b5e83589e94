"""The old name of `mpdemo.trial`; goes when nothing imports it."""

from mpdemo.trial import *  # noqa: F403

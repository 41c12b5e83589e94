"""Moved to `mpdemo.plan.counting`; this name is for the labs that still import it."""

from mpdemo.plan.counting import CountMessages, LiveMemory, peak_of_a_step, sent_in_a_step

__all__ = ["CountMessages", "LiveMemory", "peak_of_a_step", "sent_in_a_step"]
STEPS = 2  # of `sent_in_a_step`

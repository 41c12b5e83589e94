"""The exercises of the notebooks: a reader's answer goes to `check`, which tries it and says what is wrong with it.

One file per notebook holds its checks; a check runs the answer, in real processes where it is a program.
"""

from mpdemo.exercises.check import check

__all__ = ["check"]

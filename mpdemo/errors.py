"""The one exception for a user's mistake: shown as one line, exit status 2, no traceback."""


class UserError(Exception):
    """Bad input. The message says what was wrong, the value, what is allowed and what to do.

    `python -m mpdemo` prints it after ``mpdemo: error:`` and ends with exit status 2. In a notebook the
    traceback is folded to that one line.
    """

    def _render_traceback_(self):
        """IPython calls this instead of drawing a traceback."""
        return [f"{type(self).__name__}: {self}"]

"""What a notebook displays: one thing in several forms, of which the front end shows the richest that it knows."""

import base64
from pathlib import Path


class Bundle:
    """A display object with its forms by MIME type, in `data`: ``Bundle("one line", html="<b>one line</b>")``.

    The plain `text` must not depend on timing, so that a test can compare it; a terminal, a screen reader or a failed
    image shows it too. Further forms are named ``markdown``, ``html`` or ``png`` (base64 text); `width` is that of the
    picture on the page in CSS pixels, and `alt` describes it with its numbers.
    """

    MIME = {"markdown": "text/markdown", "html": "text/html", "png": "image/png"}

    def __init__(self, text, *, width=None, alt=None, **forms):
        self.data = {"text/plain": text} | {self.MIME[name]: value for name, value in forms.items()}
        picture = {name: value for name, value in (("width", width), ("alt", alt)) if value}
        self.metadata = {"image/png": picture} if picture else {}

    def __repr__(self):
        return self.data["text/plain"]

    def _repr_mimebundle_(self, include=None, exclude=None):
        """IPython calls this to display the object."""
        return self.data, self.metadata

    def save(self, path):
        """Write the picture as a PNG file."""
        Path(path).write_bytes(base64.b64decode(self.data["image/png"]))

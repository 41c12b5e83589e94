"""What the notebooks' jobs run: ``python -m mpdemo.labs.NAME`` runs ``notebooks/labs/NAME.py``, a plain script.

The one in the folder you work in comes first, then the one of this checkout; a wheel carries them in here.
"""

from mpdemo import paths

__path__[:0] = [str(paths.root() / "notebooks" / "labs")]
__path__.append(str(paths.source() / "notebooks" / "labs"))

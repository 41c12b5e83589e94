"""Where the project lies, so that a notebook and a job speak of the same folders."""

from pathlib import Path


def root() -> Path:
    """Return the project's root: the folder that holds ``mpdemo/``, ``notebooks/`` and ``slurm/``."""
    return Path(__file__).resolve().parent.parent

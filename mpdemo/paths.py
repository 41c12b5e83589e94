"""Where the project lies, so that a notebook and a job speak of the same folders."""

import os
from pathlib import Path

SITES = Path("slurm", "sites")


def root() -> Path:
    """Return the project's root: the folder that one works in, with ``notebooks/``, ``slurm/`` and ``runs/``.

    It is ``MPDEMO_ROOT``, else the current folder or the nearest one above it that has ``slurm/sites`` (batch scripts
    find it so). Where none has, as in a copy of ``notebooks/`` alone, it is the folder that holds ``notebooks/``, else
    the current folder. So learners who share one installation work each in a folder of their own.
    """
    if given := os.environ.get("MPDEMO_ROOT"):
        return Path(given).absolute()
    current = Path.cwd()
    # the folder of the notebook that is open
    opened = current.parent if current.name == "solutions" else current
    holder = opened.parent if opened.name == "notebooks" else current
    return next((folder for folder in (current, *current.parents) if (folder / SITES).is_dir()), holder)


def source() -> Path:
    """Return the folder that holds the package's source, ``mpdemo/``."""
    return Path(__file__).resolve().parent.parent


def slurm_files(*patterns) -> dict:
    """Return the files of ``slurm/`` that match, by name: those shipped, then those of the folder one works in.

    Of several files with one name, your own counts more than the one that came with mpdemo (inside the package, or in
    the checkout), and in one folder that of a later pattern counts more.
    """
    package = Path(__file__).resolve().parent
    shipped = package if (package / SITES).is_dir() else package.parent
    folders = [folder / "slurm" for folder in (shipped, root())]
    return {
        file.stem: file
        for folder in folders
        for pattern in patterns
        for file in sorted(folder.glob(pattern))
    }

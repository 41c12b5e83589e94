"""Which files of the project a command reads as programs: its script, and what that imports. Nothing is imported here.

A job whose programs have changed is not the job that ran. Modification times do not tell: a copy may keep an old one.
"""

import ast
import contextlib
import functools
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path

from mpdemo import foreign, paths

MOST, LARGEST = 1_000, 2**20  # files; bytes of one, of which the rest is not read
LABS = "mpdemo.labs", "notebooks.labs"  # the folder of that package


def programs(command: tuple[str, ...]) -> dict[str, str]:
    """Return the programs of a command (the words after ``python``): their paths from the root, and their digests.

    Found are the files that the command, an import or a text in one of them names, in the folder of the script (or the
    root, for a module) and in the folders of the root that Python searches. A name that is put together is not found.
    """
    root, texts, seen = paths.root(), {}, {}
    shared = [
        folder for folder in map(Path, [*sys.path, str(paths.source())]) if folder.is_relative_to(root)
    ]
    shared = [folder for folder in shared if "site-packages" not in folder.parts]
    waiting = list(of_command(command, root, seen))
    for file, home in waiting:
        if file not in texts and len(texts) < MOST and (text := content(file)) is not None:
            texts[file] = text
            waiting += ((found, home) for found in of_text(text, file, [home, *shared], root, seen))
    digest = {file: hashlib.blake2b(text, digest_size=8).hexdigest() for file, text in texts.items()}
    return {os.path.relpath(file, root): digest[file] for file in sorted(digest)}


def of_command(command, root, seen) -> Generator:
    """Yield the files that a command names, and the folder from which each one's imports are found first."""
    for before, word in pairwise(("", *command)):
        if before == "-m":
            for name in word, f"{word}.__main__":
                yield from ((file, root) for file in of_module(root, name, seen))
        elif before == "-c":
            yield from ((file, root) for file in of_text(word, root / "-c", [root], root, seen))
        for part in re.split("[=:]", word):  # file.py:function, --script=file.py
            if not before or part.endswith(".py"):
                yield from ((file, file.parent) for file in (root / part, root / part / "__main__.py"))


def of_text(text, file, folders, root, seen) -> Generator[Path]:
    """Yield the files that a program imports, or names in a text."""
    for level, name in named_in(text):
        if name.endswith(".py"):
            yield from (file.parent / name, root / name)
        for place in [file.parents[level - 1]] if 0 < level <= len(file.parents) else folders:
            yield from of_module(place, name, seen)


@functools.lru_cache(MOST)
def named_in(text) -> set:
    """Return what a program imports, with the number of dots before it, and its texts; nothing where it has errors."""
    names = set()
    with (
        warnings.catch_warnings(),
        contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError),
    ):
        warnings.simplefilter("ignore")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {(0, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of = f"{node.module}." if node.module else ""
                names |= {(node.level, of + alias.name) for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                names.add((0, node.value))
    return names


def of_module(folder, name, seen) -> Generator[Path]:
    """Yield the files that an import of a dotted name from a folder may read; `seen` keeps what folders hold."""
    for part in re.sub(rf"^{re.escape(LABS[0])}\b", LABS[1], name).split("."):
        if folder not in seen:
            seen[folder] = set()
            with contextlib.suppress(OSError):
                seen[folder].update(os.listdir(folder))
        if f"{part}.py" in seen[folder]:
            yield folder / f"{part}.py"
        if part not in seen[folder]:
            return
        folder = folder / part
        yield folder / "__init__.py"


def content(file) -> bytes | None:
    """Return what a regular file holds; None for anything else, and for one that cannot be read."""
    try:
        with foreign.opened(file) as opened:
            return opened.read(LARGEST)
    except (OSError, ValueError):
        return None


def changed(earlier: object, command: tuple[str, ...]) -> str:
    """Say which program of a command is no longer as an earlier job's record has it; "" if all are."""
    if not isinstance(earlier, dict):
        return "its record does not say which files it read"
    now = programs(command)
    names = sorted({*earlier, *now})
    return next((f"{name} has changed" for name in names if earlier.get(name) != now.get(name)), "")

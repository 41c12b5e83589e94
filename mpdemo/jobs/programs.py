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
OPTION = re.compile(r"-[bBdEhiIOPqRsSuvx]*([cm])(.*)", re.DOTALL)  # of Python, perhaps with what it takes
SEARCHED = re.compile(rb"sys\.path|PYTHONPATH|sitedir")  # a program with it may import from other folders
WORD = re.compile(r"[\s=:]+")  # what is between two words of a text
LABS = "mpdemo.labs", "notebooks.labs"  # the folder of that package


def programs(command: tuple[str, ...]) -> dict[str, str]:
    """Return the programs of a command (the words after ``python``): their paths from the root, and their digests.

    Found are the files that the command, an import or a text in one of them names. Imports are looked for in the folder
    of the script (or the root, for a module), in the folders of the root that Python searches, and in those that a
    text of a program with sys.path names. A name that is put together of parts of words is not found.
    """
    root, texts, seen = paths.root(), {}, {}
    shared = [
        folder for folder in map(Path, [*sys.path, str(paths.source())]) if folder.is_relative_to(root)
    ]
    shared = [folder for folder in shared if "site-packages" not in folder.parts]
    waiting = list(of_command(command, shared, root, seen))
    for file, folders in waiting:
        if file not in texts and len(texts) < MOST and (text := content(file)) is not None:
            texts[file] = text
            waiting += of_text(text, file, folders, root, seen)
    digest = {file: hashlib.blake2b(text, digest_size=8).hexdigest() for file, text in texts.items()}
    return {os.path.relpath(file, root): digest[file] for file in sorted(digest)}


def of_command(command, shared, root, seen) -> Generator:
    """Yield the files that a command names, each with the folders in which its imports are looked for."""
    known = False  # which word is the program
    for before, word in pairwise(("", *command)):
        option = OPTION.fullmatch(word)
        kind, given = (
            option.groups() if option and option[2] else ((OPTION.fullmatch(before) or "  ")[1], word)
        )
        if kind == "m":
            for name in given, f"{given}.__main__":
                yield from ((file, [root, *shared]) for file in of_module(root, name, seen))
        elif kind == "c":
            yield from of_text(given.encode(errors="replace"), root / "-c", [root, *shared], root, seen)
        is_script = not known and word[:1] != "-" and before not in ("-W", "-X")
        known = known or is_script or kind in ("m", "c")
        for part in WORD.split(word):  # file.py:function, --script=file.py
            if is_script or part.endswith(".py"):
                files = root / part, root / part / "__main__.py"
                yield from ((file, [file.parent, *shared]) for file in files)


def of_text(text, file, folders, root, seen) -> Generator:
    """Yield the files that a program imports, or names in a text, each with the folders for its own imports."""
    names = named_in(text)
    above = [folder for folder in file.parents if folder.is_relative_to(root)] or [file.parent]
    texts = {name for level, name in names if not level}
    named = [path for folder in above for name in texts for path in entry(folder, name, root, seen)]
    places = list(dict.fromkeys(filter(os.path.isdir, named)))
    if SEARCHED.search(text):
        folders = list(dict.fromkeys([*folders, *places]))
    words = {word for name in texts if ".py" in name for word in WORD.split(name)}
    named = [
        path
        for folder in [*above, *folders, *places]
        for word in words
        for path in entry(folder, word, root, seen)
    ]
    yield from ((path, folders) for path in named if path.suffix == ".py")
    for level, name in names:
        for place in [file.parents[level - 1]] if 0 < level <= len(file.parents) else folders:
            yield from ((found, folders) for found in of_module(place, name, seen))


def entry(folder, name, root, seen) -> Generator[Path]:
    """Yield what a relative path leads to from a folder, if that may be there, in the root."""
    if name.partition("/")[0] in (".", "..", *held(folder, seen)):
        path = Path(os.path.normpath(folder / name))
        if path.is_relative_to(root):
            yield path


def held(folder, seen) -> set:
    """Return the names of what a folder holds; `seen` keeps them."""
    if folder not in seen:
        seen[folder] = set()
        with contextlib.suppress(OSError, ValueError):
            seen[folder].update(os.listdir(folder))
    return seen[folder]


@functools.lru_cache(MOST)
def named_in(text) -> set:
    """Return what a program imports, with the number of dots before it, and its texts; nothing where it has errors."""
    names = set()
    with (
        warnings.catch_warnings(),
        contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError),
    ):
        warnings.simplefilter("ignore")
        nodes = list(ast.walk(ast.parse(text)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {(0, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of = f"{node.module}." if node.module else ""
                names |= {(node.level, of + alias.name) for alias in node.names}
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and len(node.value) < 200
                and id(node) not in docstrings
            ):
                names.add((0, node.value))
    return names


def of_module(folder, name, seen) -> Generator[Path]:
    """Yield the files that an import of a dotted name from a folder may read."""
    for part in re.sub(rf"^{re.escape(LABS[0])}\b", LABS[1], name).split("."):
        if f"{part}.py" in held(folder, seen):
            yield folder / f"{part}.py"
        if part not in held(folder, seen):
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

"""Show source in a notebook, in a fenced block that JupyterLab colours: a file, one thing in it, a text, a change.

The source is found in the file by path and name, so PyTorch is not imported.

    show("rungs/ddp.py")                             a whole file
    show("rungs/ddp.py", "train")                    one function in it; "Class.method" for a method
    show("rungs/ddp.py", lines=("optimizer =",))     the line that holds this text
    show("#!/bin/bash\\n...")                         a text of several lines
    diff("rungs/single.py", "rungs/ddp.py")          what differs, as git shows it
"""

import ast
import base64
import difflib
import textwrap
from pathlib import Path
from typing import NamedTuple

from mpdemo import paths
from mpdemo.errors import UserError, did_you_mean

LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".toml": "toml", ".json": "json", ".md": "markdown"}
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MIME = {"markdown": "text/markdown", "html": "text/html", "png": "image/png"}


class Bundle:
    """What a cell displays, in several forms, of which JupyterLab shows the richest that it knows.

    The plain `text` must not depend on timing, so that a test can compare it; a terminal, a screen reader or a failed
    image shows it too. Further forms are named ``markdown``, ``html`` or ``png`` (base64 text); `picture` describes the
    picture: its ``width`` on the page in CSS pixels, and an ``alt`` text with its numbers.
    """

    def __init__(self, text, picture=None, **forms):
        self.data = {"text/plain": text} | {MIME[name]: value for name, value in forms.items()}
        self.metadata = {"image/png": picture} if picture else {}

    def __repr__(self):
        return self.data["text/plain"]

    def _repr_mimebundle_(self, include=None, exclude=None):
        """IPython calls this to display the object."""
        return self.data, self.metadata

    def save(self, path):
        """Write the picture as a PNG file."""
        Path(path).write_bytes(base64.b64decode(self.data["image/png"]))


class Source(NamedTuple):
    """A text with its heading and language; `path`, relative to the project's root, where it is in a file there."""

    title: str
    text: str
    language: str = "text"
    path: str | None = None


def show(target, name=None, *, lines=None, docstrings=True) -> Bundle:
    """Display the source of a file, of one thing in it, or a text.

    Parameters
    ----------
    target : str or Path
        A file, relative to ``mpdemo/`` or to the project's root (``"rungs/ddp.py"``, ``"slurm/03_ddp.sbatch"``), or a
        text of several lines.
    name : str, optional
        The qualified name inside the file: ``"train"``, ``"Blocks.cut"``, a constant's name.
    lines : (str, str) or (str,), optional
        Only the lines from the first one that holds the first text to the next one that holds the second.
    docstrings : bool
        Whether the docstrings stay.
    """
    source = find(target, name, docstrings=docstrings)
    text = textwrap.dedent(_between(source, *lines) if lines else source.text).strip("\n")
    title = source.title.replace("__", r"\_\_")  # Markdown would write __init__ in bold letters
    heading = f"[{title}](../{source.path})\n\n" if source.path else ""
    return Bundle(source.title, markdown=heading + _fenced(text, source.language))


def diff(before, after, context=3) -> Bundle:
    """Display the lines that two sources do not share, marked with - (before) and + (after), without docstrings.

    Parameters
    ----------
    before, after : str, Path or tuple
        As `target` of `show`; a tuple ``(path, name)`` picks one thing in a file.
    context : int
        Equal lines kept around a change.
    """
    targets = [side if isinstance(side, tuple) else (side,) for side in (before, after)]
    old, new = (find(*target, docstrings=False) for target in targets)
    both = old.text.splitlines(), new.text.splitlines()
    lines = difflib.unified_diff(*both, old.title, new.title, lineterm="", n=context)
    # the numbers after @@ would count lines of a text without its docstrings
    text = "\n".join("@@" if line.startswith("@@") else line for line in lines)
    if not text:
        return Bundle(f"{old.title} and {new.title} are the same")
    return Bundle(text, markdown=_fenced(text, "diff"))


def _fenced(text, language) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}"


def find(target, name=None, *, docstrings=True) -> Source:
    """Return the source that `show` displays."""
    if not isinstance(target, str | Path):
        raise UserError(f"cannot show a {type(target).__name__}; give a path, a path and a name, or a text")
    if "\n" in str(target):
        return Source("text", target, "bash" if target.startswith("#!") else "text")
    path = _locate(target)
    folder = next((one for one in (paths.root(), paths.source()) if path.is_relative_to(one)), None)
    title = path.relative_to(folder).as_posix() if folder else path.name
    text, language = path.read_text(), LANGUAGES.get(path.suffix, "text")
    if name is not None:
        text = _named(text, name, title)
    if not docstrings and language == "python":
        text = _without_docstrings(text)
    return Source(f"{title}: {name}" if name else title, text, language, title if folder else None)


def _locate(target) -> Path:
    package = paths.source() / "mpdemo"
    for folder in (package, paths.root(), paths.root() / "notebooks", paths.source() / "notebooks"):
        if (folder / target).is_file():
            return folder / target
    known = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    raise UserError(f"no such file: {target}; looked in mpdemo/ and in the project's root{did_you_mean(target, known)}")


def _between(source, first, last=None) -> str:
    """Return the lines from the first one that holds a text to the next one that holds another."""
    kept = []
    for line in source.text.splitlines():
        if kept or first in line:
            kept.append(line)
        if kept and (last or first) in line:
            return "\n".join(kept)
    raise UserError(f"no line with {(last if kept else first)!r} in {source.title}")


def _named(text, name, title) -> str:
    """Return the lines of one thing in a module, with its decorators."""
    nodes = _nodes(ast.parse(text))
    if name not in nodes:
        raise UserError(f"no {name!r} in {title}; it has: {', '.join(nodes)}")
    node = nodes[name]
    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _nodes(tree, prefix="") -> dict:
    """Return functions, classes and constants by their qualified names."""
    nodes = {}
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            nodes |= {prefix + node.name: node} | _nodes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            nodes |= {prefix + target.id: node for target in targets if isinstance(target, ast.Name)}
    return nodes


def _without_docstrings(text) -> str:
    """Return a source without docstrings and without the empty line after each."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | DEFINITIONS) or not ast.get_docstring(node):
            continue
        if len(node.body) > 1 or isinstance(node, ast.Module):  # else the docstring is the whole body
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            last += last < len(lines) and not lines[last]
            lines[first:last] = [None] * (last - first)
    return "\n".join(line for line in lines if line is not None)

"""Show source in a notebook, in a fenced block that the front end colours: a file, one thing in it, or a text.

The source is found in the file by path and name, so PyTorch is not imported.

    show("rungs/ddp.py")                             a whole file
    show("rungs/ddp.py", "train")                    one function in it; "Class.method" for a method
    show("rungs/ddp.py", lines=("optimizer =",))     the line that holds this text
    show("#!/bin/bash\\n...")                         a text of several lines
"""

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError, did_you_mean
from mpdemo.notebook.bundle import Bundle

LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".toml": "toml", ".json": "json", ".md": "markdown"}
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Source:
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

    Raises
    ------
    UserError
        No such file, no such name in it (its names are listed), or no such lines.
    """
    source = find(target, name, docstrings=docstrings)
    text = textwrap.dedent(_between(source, *lines) if lines else source.text).strip("\n")
    title = source.title.replace("__", r"\_\_")  # Markdown would write __init__ in bold letters
    heading = f"[{title}](../{source.path})\n\n" if source.path else ""
    fence = "````" if "```" in text else "```"
    return Bundle(source.title, markdown=f"{heading}{fence}{source.language}\n{text}\n{fence}")


def find(target, name=None, *, docstrings=True) -> Source:
    """Return the source that `show` displays."""
    if not isinstance(target, str | Path):
        raise UserError(f"cannot show a {type(target).__name__}; give a path, a path and a name, or a text")
    if "\n" in str(target):
        return Source("text", target, "bash" if target.startswith("#!") else "text")
    path = _locate(target)
    folder = next((one for one in (paths.root(), paths.source()) if path.is_relative_to(one)), None)
    title = path.relative_to(folder).as_posix() if folder else path.name
    source = Source(title, path.read_text(), LANGUAGES.get(path.suffix, "text"), title if folder else None)
    if name is not None:
        source.title, source.text = f"{title}: {name}", _named(source.text, name, title)
    if not docstrings and source.language == "python":
        source.text = _without_docstrings(source.text)
    return source


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

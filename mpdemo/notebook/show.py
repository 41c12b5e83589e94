"""Show source in a notebook: a file, one thing in it, or a text.

The source is found in the file by path and name, so PyTorch is not imported. It is a fenced block of Markdown,
which the front end colours with its own theme.

    show("parallel/ddp.py")                   a whole file
    show("parallel/ddp.py", "DDP.step")       one method in it
    show("parallel/ddp.py", lines=("self.parallel =",))     the line that holds this text
    show("#!/bin/bash\\n...")                  a text of several lines
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
    """Some lines of one file, or a text.

    `lines` holds pairs (line number, text); `title` is the heading; `path` is relative to the project's root, and
    None where the source comes from no file of the project.
    """

    title: str
    lines: list
    language: str
    path: str | None = None

    @property
    def text(self) -> str:
        return textwrap.dedent("\n".join(text for _, text in self.lines)).strip("\n")


def show(target, name=None, *, lines=None, docstrings=True) -> Bundle:
    """Display the source of a file, of one thing in it, or a text.

    Parameters
    ----------
    target : str or Path
        A file, relative to ``mpdemo/`` or to the project's root (``"parallel/ddp.py"``,
        ``"slurm/03_ddp.sbatch"``), or a text of several lines.
    name : str, optional
        The qualified name inside the file: ``"train"``, ``"DDP.step"``, a constant's name.
    lines : (str, str) or (str,), optional
        Only the lines from the first one that holds the first text to the next one that holds the second.
    docstrings : bool
        Whether the docstrings stay.

    Returns
    -------
    Bundle
        Markdown, and the title as plain text.

    Raises
    ------
    UserError
        No such file, no such name in it (its names are listed), or no such lines.
    """
    source = find(target, name, docstrings=docstrings)
    if lines:
        source.lines = _between(source, *lines)
    title = source.title.replace("__", r"\_\_")  # Markdown would write __init__ in bold letters
    heading = f"[{title}](../{source.path})\n\n" if source.path else ""
    fence = "````" if "```" in source.text else "```"
    return Bundle(source.title, markdown=f"{heading}{fence}{source.language}\n{source.text}\n{fence}")


def find(target, name=None, *, docstrings=True) -> Source:
    """Return the source that `show` displays; the line numbers are the file's own, also without docstrings."""
    if not isinstance(target, str | Path):
        raise UserError(f"cannot show a {type(target).__name__}; give a path, a path and a name, or a text")
    if "\n" in str(target):
        language = "bash" if target.startswith("#!") else "text"
        return Source("text", list(enumerate(target.splitlines(), 1)), language)
    source = _from_file(_locate(target), name)
    if not docstrings and source.language == "python":
        source.lines = _without_docstrings(source.lines)
    return source


def _locate(target) -> Path:
    """Return the path of `target`: absolute, or relative to ``mpdemo/``, the project's root or its ``notebooks/``."""
    package = paths.source() / "mpdemo"
    for folder in (package, paths.root(), paths.root() / "notebooks", paths.source() / "notebooks"):
        if (folder / target).is_file():
            return folder / target
    known = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    hint = did_you_mean(target, known)
    raise UserError(f"no such file: {target}; looked in mpdemo/ and in the project's root{hint}")


def _from_file(path, name) -> Source:
    text = path.read_text()
    folder = next((one for one in (paths.root(), paths.source()) if path.is_relative_to(one)), None)
    title = path.relative_to(folder).as_posix() if folder else path.name
    source = Source(
        title, list(enumerate(text.splitlines(), 1)), LANGUAGES.get(path.suffix, "text"), title if folder else None
    )
    if name is not None:
        spans = _spans(ast.parse(text))
        if name not in spans:
            raise UserError(f"no {name!r} in {title}; it has: {', '.join(spans)}")
        first, last = spans[name]
        source.title, source.lines = f"{title}: {name}", source.lines[first - 1 : last]
    return source


def _between(source, first, last=None) -> list:
    """Return the lines from the first one that holds a text to the next one that holds another."""
    kept = []
    for line in source.lines:
        if kept or first in line[1]:
            kept.append(line)
        if kept and (last or first) in line[1]:
            return kept
    raise UserError(f"no line with {(last if kept else first)!r} in {source.title}")


def _spans(tree, prefix="") -> dict:
    """Map each qualified name in a module to its first and last line, decorators included."""
    spans = {}
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            spans[prefix + node.name] = (first, node.end_lineno)
            spans |= _spans(node, prefix + node.name + ".")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            spans |= {prefix + t.id: (node.lineno, node.end_lineno) for t in targets if isinstance(t, ast.Name)}
    return spans


def _without_docstrings(lines) -> list:
    """Return the lines without docstrings and without the empty line after each."""
    dropped = set()
    for node in ast.walk(ast.parse(textwrap.dedent("\n".join(text for _, text in lines)))):
        if not isinstance(node, ast.Module | DEFINITIONS) or not ast.get_docstring(node):
            continue
        if len(node.body) == 1 and not isinstance(node, ast.Module):
            continue  # the docstring is the whole body
        first, last = node.body[0].lineno, node.body[0].end_lineno
        after_is_empty = last < len(lines) and not lines[last][1].strip()
        dropped.update(range(first, last + 1 + after_is_empty))
    return [line for number, line in enumerate(lines, 1) if number not in dropped]

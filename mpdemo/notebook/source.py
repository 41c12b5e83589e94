"""Find the source of a thing by its path and name, without importing it (so without loading PyTorch)."""

import ast
import difflib
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mpdemo.errors import UserError
from mpdemo.paths import root

LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".toml": "toml", ".json": "json", ".md": "markdown"}


@dataclass
class Source:
    """Some lines of one file.

    `lines` holds pairs (number in the file, text); `title` names the thing; `path` is relative to the
    project's root, and None where the source comes from a cell or a string.
    """

    title: str
    lines: list
    language: str = "python"
    path: str | None = None

    @property
    def text(self) -> str:
        return textwrap.dedent("\n".join(text for _, text in self.lines)).strip("\n")


def find(target, name=None, *, docstrings=True) -> Source:
    """Return the source of a file, of something in it, of an object, or of a text.

    Parameters
    ----------
    target : str, Path or object
        A file, relative to ``mpdemo/`` or to the project's root (``"parallel/ddp.py"``,
        ``"slurm/03_ddp.sbatch"``); a text of several lines; or a function, class or module.
    name : str, optional
        The qualified name inside the file: ``"train"``, ``"DDP.step"``, a constant's name.
    docstrings : bool
        Whether the docstrings stay; line numbers are the file's own in both cases.

    Raises
    ------
    UserError
        No such file, or no such name in it (the names it has are listed).
    """
    if isinstance(target, str) and "\n" in target:
        language = "bash" if target.startswith("#!") else "text"
        source = Source("text", list(enumerate(target.splitlines(), 1)), language)
    elif isinstance(target, str | Path):
        source = _from_file(_locate(target), name)
    elif isinstance(target, ModuleType):
        source = _from_file(Path(target.__file__), name)
    else:
        source = _from_object(target)
    if not docstrings and source.language == "python":
        source.lines = _without_docstrings(source.lines)
    return source


def _locate(target) -> Path:
    """Return the file meant by `target`: as it is, under ``mpdemo/`` or under the project's root."""
    for folder in (root() / "mpdemo", root()):
        if (folder / target).is_file():
            return folder / target
    known = sorted(str(p.relative_to(root() / "mpdemo")) for p in (root() / "mpdemo").rglob("*.py"))
    near = difflib.get_close_matches(str(target), known, n=3, cutoff=0.4) or known
    raise UserError(
        f"no such file: {target}; looked in mpdemo/ and in the project's root; do you mean {', '.join(near)}?"
    )


def _from_file(path, name) -> Source:
    text = path.read_text()
    inside = path.is_relative_to(root())
    shown = str(path.relative_to(root())) if inside else path.name
    lines = list(enumerate(text.splitlines(), 1))
    if name is None:
        return Source(shown, lines, LANGUAGES.get(path.suffix, "text"), shown if inside else None)
    named = _names(ast.parse(text))
    if name not in named:
        raise UserError(f"no {name!r} in {shown}; it has: {', '.join(named)}")
    first, last = named[name]
    return Source(f"{shown}: {name}", lines[first - 1 : last], "python", shown if inside else None)


def _from_object(target) -> Source:
    """Return the source of a live function or class, of the package or of a cell."""
    target = inspect.unwrap(target) if callable(target) else target
    if not hasattr(target, "__qualname__"):
        raise UserError(f"nothing to show for a {type(target).__name__}; give a path, a function, a class or a module")
    name = target.__qualname__
    file = inspect.getsourcefile(target)
    if file and Path(file).is_relative_to(root() / "mpdemo"):
        return _from_file(Path(file), name)
    lines, first = inspect.getsourcelines(target)
    return Source(name, list(enumerate((line.rstrip("\n") for line in lines), first)))


def _names(tree, prefix="") -> dict:
    """Map each qualified name in a module to its first and last line, decorators included."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[prefix + node.name] = (first, node.end_lineno)
            found |= _names(node, prefix + node.name + ".")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {prefix + t.id: (node.lineno, node.end_lineno) for t in targets if isinstance(t, ast.Name)}
    return found


def _without_docstrings(lines) -> list:
    """Drop the docstrings, and the empty lines that they leave at the top."""
    text = textwrap.dedent("\n".join(line for _, line in lines))
    drop = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            only = len(body) == 1 and not isinstance(node, ast.Module)  # a body of nothing else keeps it
            drop |= set() if only else set(range(body[0].lineno, body[0].end_lineno + 1))
            after = body[0].end_lineno + 1
            if not only and after <= len(lines) and not lines[after - 1][1].strip():
                drop.add(after)
    return [pair for index, pair in enumerate(lines, 1) if index not in drop]

"""Show source in a notebook, in colours: a file, or one thing in it.

The source is found in the file by path and name, so PyTorch is not imported.

    show("rungs/ddp.py")                             a whole file
    show("rungs/ddp.py", "train")                    one function, class or constant in it
    show("rungs/ddp.py", lines=("optimizer =",))     the line that holds this text
"""

import ast
import base64
import os
import textwrap
from pathlib import Path
from typing import Any

from mpdemo import foreign, paths
from mpdemo.errors import UserError, text_of

LARGEST = 2**20  # bytes of what is shown
LANGUAGES = {
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".toml": "toml",
    ".json": "json",
    ".md": "markdown",
}
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# as in a code cell: 88 columns fit beside the file browser in 1200 pixels
SMALLER = '<div style="font-size:.9em">'
MIME = {"markdown": "text/markdown", "html": "text/html", "png": "image/png"}


class Bundle:
    """What a cell displays, in several forms, of which JupyterLab shows the richest that it knows.

    The plain `text` must not depend on timing, so that a test can compare it; a terminal, a screen reader or a failed
    image shows it too. Further forms are named ``markdown``, ``html`` or ``png`` (base64 text); `picture` describes the
    picture: its ``width`` on the page in CSS pixels, and an ``alt`` text with its numbers.
    """

    def __init__(self, text: str, picture: dict[str, Any] | None = None, **forms: str) -> None:
        self.data = {"text/plain": text} | {MIME[name]: value for name, value in forms.items()}
        self.metadata = {"image/png": picture} if picture else {}

    def __repr__(self) -> str:
        return self.data["text/plain"]

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """IPython calls this to display the object."""
        return self.data, self.metadata

    def save(self, path: str | Path) -> None:
        """Write the picture as a PNG file."""
        Path(path).write_bytes(base64.b64decode(self.data["image/png"]))


def show(
    target: str | Path,
    name: str | None = None,
    *,
    lines: tuple[str, ...] | None = None,
    docstrings: bool = True,
) -> Bundle:
    """Display the source of a file, or of one thing in it.

    Parameters
    ----------
    target : str or Path
        A file, relative to ``mpdemo/``, to ``notebooks/`` or to the project's root: ``"rungs/ddp.py"``,
        ``"slurm/one_node.sbatch"``.
    name : str, optional
        Of a function, a class or a constant in the file.
    lines : (str, str) or (str,), optional
        Only the lines from the first one that holds the first text to the next one that holds the second.
    docstrings : bool
        Whether the docstrings stay.

    Raises
    ------
    UserError
        There is no such file, nothing of this name in it, or no such line.
    """
    title, text, language = find(target, name, docstrings=docstrings)
    text = textwrap.dedent(_between(text, title, *lines) if lines else text).strip("\n")
    file = title.partition(":")[0]
    return Bundle(
        title, markdown=f"[{title}](../{file})\n\n{SMALLER}\n\n```{language}\n{text}\n```\n\n</div>"
    )


def find(target: str | Path, name: str | None = None, *, docstrings: bool = True) -> tuple[str, str, str]:
    """Return the title, the text and the language of what `show` displays."""
    places = (
        paths.source() / "mpdemo",
        paths.root(),
        paths.root() / "notebooks",
        paths.source() / "notebooks",
    )
    target = text_of(target, "what is shown, as 'rungs/ddp.py',")
    path = next((folder / target for folder in places if os.path.isfile(folder / target)), None)
    if not path:
        raise UserError(
            f"no such file: {target!r}; looked in mpdemo/, in notebooks/ and in the project's root"
        )
    folder = paths.root() if path.is_relative_to(paths.root()) else paths.source()
    title = path.relative_to(folder).as_posix()
    language = LANGUAGES.get(path.suffix, "text")
    with foreign.faults(
        f"{title} can't be shown", "show takes a text, or a program without a syntax error"
    ):
        text = foreign.text(path, LARGEST)
        if name is not None:
            text = _named(text, name, title)
            title = f"{title}: {name}"
        return title, text if docstrings or language != "python" else _without_docstrings(text), language


def _between(text: str, title: str, first: str, last: str | None = None) -> str:
    """Return the lines from the first one that holds a text to the next one that holds another."""
    kept = []
    for line in text.splitlines():
        if kept or first in line:
            kept.append(line)
        if kept and (last or first) in line:
            return "\n".join(kept)
    raise UserError(f"no line with {(last if kept else first)!r} in {title}")


def _named(text: str, name: str, title: str) -> str:
    """Return the lines of a function, a class or a constant of a module, with its decorators."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, DEFINITIONS):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    if name not in found:
        raise UserError(f"no {name!r} in {title}; it has: {', '.join(found)}")
    first = min(part.lineno for part in (found[name], *getattr(found[name], "decorator_list", ())))
    return "\n".join(text.splitlines()[first - 1 : found[name].end_lineno])


def _without_docstrings(text: str) -> str:
    """Return a source without docstrings and without the empty line after each."""
    lines = text.splitlines()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | DEFINITIONS) or not ast.get_docstring(node):
            continue
        if len(node.body) > 1 or isinstance(node, ast.Module):  # else the docstring is the whole body
            docstring = node.body[0]
            end = docstring.end_lineno or docstring.lineno
            left_out.update(range(docstring.lineno - 1, end))
            if end < len(lines) and not lines[end]:
                left_out.add(end)
    return "\n".join(line for number, line in enumerate(lines) if number not in left_out)

"""The project's files as a new clone has them, and how much is in them."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import tokenize
from pathlib import Path

from mpdemo.paths import root

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def files() -> list:
    """Return the project's files, relative to its root: what git tracks, and what it would take up."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root(), check=True, capture_output=True, text=True).stdout.split(
        "\0"
    )
    return sorted(Path(name) for name in set(names) if name and (root() / name).is_file())


def text_of(page) -> str:
    """Return the text of all cells of a notebook, such as "55_how_often"."""
    cells = json.loads((root() / "notebooks" / page).with_suffix(".ipynb").read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def bash_blocks(page) -> list:
    """Return what a notebook shows in blocks of bash."""
    return re.findall(r"^```bash\n(.*?)^```", text_of(page), re.M | re.S)


def fresh_copy(folder) -> Path:
    """Copy the project's files to `folder`: no run folders, no caches, nothing from another day."""
    folder = Path(folder)
    for file in files():
        (folder / file.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(root() / file, folder / file)
    return folder


def python_path(*folders) -> str:
    """Return a PYTHONPATH with these folders before those of this run."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(folder, **more) -> dict:
    """Return the environment for a child that works in the copy at `folder`: its package, its own Jupyter folders."""
    private = {
        "PYTHONPATH": python_path(folder),
        "IPYTHONDIR": f"{folder}/.ipython",
        "JUPYTER_CONFIG_DIR": f"{folder}/.jupyter/config",
        "JUPYTER_DATA_DIR": f"{folder}/.jupyter/data",
        "JUPYTER_RUNTIME_DIR": f"{folder}/.jupyter/runtime",
        "TQDM_DISABLE": "1",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    return inherited("PYTEST_CURRENT_TEST", "JPY_SESSION_NAME", "JPY_PARENT_PID") | private | more


def inherited(*dropped) -> dict:
    """Return the environment of this process without some variables."""
    return {name: value for name, value in os.environ.items() if name not in dropped}


def tokens(text) -> int:
    """Count the tokens of a program that stand for something."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node)
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type not in SKIPPED and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in found
    )

"""Build the course's site in build/site: ``make site``. It needs no network, and the pages need none either.

The pages are the project's own, with the outputs that are saved in the notebooks. Added are the command line's help
and a page of the names that a learner imports. Diagrams are drawn here, by JupyterLab in the system's Chromium: the
script that draws them in a notebook would come from elsewhere.
"""

import argparse
import hashlib
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

import nbformat

sys.path.insert(0, str(Path(__file__).parents[1]))
import documents
from labserver import CHROMIUM, chromium_page, lab
from project import fresh_copy

from mpdemo.__main__ import COMMANDS
from mpdemo.paths import root

HERE = Path(__file__).parent
DIAGRAM = re.compile(r"```mermaid\n(.*?)```", re.S)
WAIT = 120_000  # ms
WIDE = 560  # pixels: at a phone's width, the words in a wider picture could not be read


def main() -> int:
    """Copy the pages, draw the diagrams and let Sphinx build the site; a warning of Sphinx is an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="build/site", help="where the site goes (build/site)")
    out = Path(parser.parse_args().out).absolute()
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        pages = Path(folder)
        fresh_copy(pages)
        shutil.copy2(HERE / "conf.py", pages)
        (pages / "site_static").mkdir()
        shutil.copy2(HERE / "site.css", pages / "site_static")
        leave_out_others(pages)
        replace_diagrams(pages)
        (pages / "commands.md").write_text(commands_page())
        (pages / "api.md").write_text(api_page())
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(pages), str(out)]
        status = subprocess.run(command, cwd=root()).returncode
    if status == 0:
        (out / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')
        print(f"the site: {out / 'README.html'}")
    return status


def leave_out_others(pages):
    """Leave out a reader's own notebook, for which the site has no place; say so."""
    for file in sorted(pages.glob("notebooks/*.ipynb")):
        if "mpdemo" not in nbformat.read(file, as_version=4).metadata:
            print(f"left out: notebooks/{file.name} is none of the course's notebooks", file=sys.stderr)
            file.unlink()


def replace_diagrams(pages):
    """Put a picture in the place of each diagram; without a browser it stays as text."""
    notebooks = {
        file: nbformat.read(file, as_version=4) for file in sorted(pages.glob("notebooks/*.ipynb"))
    }
    cells = [
        cell for notebook in notebooks.values() for cell in notebook.cells if cell.cell_type == "markdown"
    ]
    texts = sorted({text for cell in cells for text in DIAGRAM.findall(cell.source)})
    pictures = drawn(texts)
    for text, picture in pictures.items():
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.svg"
        (pages / "site_static" / name).write_text(picture)
        said = re.search(r"accDescr: (.*)", text)[1].replace('"', "'")
        image = f'<div class="diagram"><img src="../_static/{name}" alt="{said}"></div>'
        for cell in cells:
            cell.source = cell.source.replace(f"```mermaid\n{text}```", image)
    for file, notebook in notebooks.items():
        tell_pictures(notebook)
        tell_objectives(notebook)
        nbformat.write(notebook, file)


def tell_pictures(notebook):
    """Give a cell's picture its alt text, and a class if it is wide, where myst-nb looks for them: in its metadata."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            picture = output.get("metadata", {}).get("image/png", {})
            if said := picture.get("alt"):
                wide = {"classes": "wide"} if picture.get("width", 0) > WIDE else {}
                cell.metadata["mystnb"] = {"image": {"alt": said} | wide}


def tell_objectives(notebook):
    """Put what a reader can do afterwards, and what it takes, under a notebook's title."""
    about = notebook.metadata.mpdemo
    before = f", after notebook {' and '.join(about.prerequisites)}" if about.prerequisites else ""
    said = [f"```{{admonition}} After this notebook you can ({about.minutes} minutes{before})"]
    said += [f"- {objective}" for objective in about.objectives]
    title, _, rest = notebook.cells[0].source.partition("\n")
    notebook.cells[0].source = "\n".join([title, "", *said, "```", rest])


def drawn(texts) -> dict:
    """Return the SVG of each diagram, as JupyterLab draws it; none without the system's Chromium."""
    if not CHROMIUM:
        print("no Chromium here: the diagrams stay text", file=sys.stderr)
        return {}
    cells = [nbformat.v4.new_markdown_cell(f"```mermaid\n{text}```") for text in texts]
    with tempfile.TemporaryDirectory(prefix="diagrams-") as folder:
        nbformat.write(nbformat.v4.new_notebook(cells=cells), Path(folder, "diagrams.ipynb"))
        with lab(folder) as (url, token), chromium_page(height=20_000) as page:
            page.goto(f"{url}/lab/tree/diagrams.ipynb?token={token}")
            page.wait_for_function(f"() => document.querySelectorAll('.jp-RenderedMermaid img').length == {len(texts)}",
                                   timeout=WAIT)  # fmt: skip
            addresses = page.eval_on_selector_all(
                ".jp-RenderedMermaid img", "all => all.map(image => image.src)"
            )
    return dict(zip(texts, (unquote(address.partition(",")[2]) for address in addresses), strict=True))


def commands_page() -> str:
    """Return the page of the command line: the help of each command."""
    parts = ["# The command line\n\nWhat `mpdemo COMMAND --help` prints.\n"]
    for name in COMMANDS:
        command = [sys.executable, "-m", "mpdemo", name, *(["run"] if name == "cluster" else []), "--help"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        parts.append(f"## {name}\n\n```text\n{said}```\n")
    return "\n".join(parts)


def api_page() -> str:
    """Return the page of the names that notebooks import from mpdemo, by module."""
    imports = re.compile(r"^from (mpdemo[\w.]*) import ([^\n(#]+)", re.M)
    names = {}
    for file in documents.notebooks():
        for cell in nbformat.read(file, as_version=4).cells:
            for module, imported in imports.findall(cell.source):
                for name in re.findall(r"(\w+)(?: as \w+)?", imported):
                    place = importlib.import_module(module)
                    if inspect.ismodule(getattr(place, name, None)) or not hasattr(place, name):
                        names.setdefault(f"{module}.{name}", set())
                    else:
                        names.setdefault(module, set()).add(name)
    parts = ["# What the notebooks import\n"]
    for module, imported in sorted(names.items()):
        shown = f".. automodule:: {module}\n   :members: {', '.join(sorted(imported))}"
        parts.append(f"## {module}\n\n```{{eval-rst}}\n{shown}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())

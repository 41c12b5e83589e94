"""Draw the still pictures of the players that the notebooks show, and put the players anew into their saved outputs.

    python tests/players.py

Where no script runs, a reader sees the still. It is taken from the player itself, so it keeps a hash of the page that
it shows: a test notices one that has become stale. Its alt text, with the numbers, is the player's own. The README's
first picture shows all recordings in the same way.
"""

import ast
import hashlib
import re
import sys
import tempfile
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import documents
from labserver import chromium_page, save_picture

from mpdemo.notebook import player as package
from mpdemo.notebook.player import player
from mpdemo.paths import root

WIDTH = 760  # of the page in pixels, which are those of the picture
COLOURS = 64  # of a palette: with 24, an all-gather had the orange of an all-reduce
ONLY = (
    "nav, .controls, .say, .card, .cursor, details { display: none !important } main { padding: 8px 10px }"
)


def calls(notebook):
    """Yield each cell that ends with a player of literal words, none of a reader's own traces, and these words."""
    for cell in notebook.cells:
        if cell.cell_type != "code" or "player(" not in cell.source or cell.source.startswith("%%"):
            continue
        last = ast.parse(cell.source).body[-1]
        if (
            isinstance(last, ast.Expr)
            and isinstance(call := last.value, ast.Call)
            and ast.unparse(call.func) == "player"
            and "*" not in ast.unparse(call)
        ):
            yield (
                cell,
                [ast.literal_eval(word) for word in call.args],
                {word.arg: ast.literal_eval(word.value) for word in call.keywords},
            )


def shown() -> dict:
    """Return the pages of all players that have a still, by the name of the still."""
    pages = {}
    for path in documents.notebooks():
        for _, words, options in calls(nbformat.read(path, as_version=4)):
            key, page, _ = package.contents(*words, **options)
            pages[key] = page
    return pages


def digest(page) -> str:
    """Return a hash of a page."""
    return hashlib.sha256(page.encode()).hexdigest()


def take(window, page, path, theme="light"):
    """Save a picture of a page without its controls, and with its alt text; what is to be guessed is shown in it."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "page.html")).write_text(page)
        window.emulate_media(color_scheme=theme)
        window.goto(file.as_uri())
    window.add_style_tag(content=ONLY)
    window.evaluate("set({ predict: false, broken: state.broken })")
    texts = {"alt": window.evaluate("alt()"), "page": digest(page), "width": str(WIDTH)}
    save_picture(window.locator("main").screenshot(), path, COLOURS, **texts)


def refresh(path):
    """Put the players of a notebook anew into its saved outputs."""
    notebook = nbformat.read(path, as_version=4)
    for cell, words, options in calls(notebook):
        data, _ = player(*words, **options)._repr_mimebundle_()
        kept = [output for output in cell.outputs if output.output_type != "execute_result"]
        result = nbformat.v4.new_output("execute_result", data, execution_count=cell.execution_count)
        cell.outputs = [*kept, result]
    documents.write(path, documents.text_of(notebook))


def front_page(window):
    """Draw the README's picture, light and dark, and put its numbers into the README."""
    _, page, _ = package.contents("all", recorded=True)
    for theme, name in {"light": "steps", "dark": "steps_dark"}.items():
        take(window, page, root() / "notebooks" / f"{name}.png", theme)
    readme, picture = root() / "README.md", 'src="notebooks/steps.png"'
    said = f'alt="{window.evaluate("alt()")}" {picture}'
    readme.write_text(re.sub(f'alt="[^"]*" {picture}', lambda match: said, readme.read_text()))


if __name__ == "__main__":
    pages, folder = shown(), package.HERE / "stills"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.png"):
        if path.stem not in pages:
            path.unlink()
    with chromium_page(WIDTH, 900) as window:
        for key, page in pages.items():
            take(window, page, folder / f"{key}.png")
            print(folder / f"{key}.png", flush=True)
        front_page(window)
    for path in documents.notebooks():
        refresh(path)

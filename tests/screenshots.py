"""Make the README's pictures of JupyterLab from the notebooks' own cells.

    python tests/screenshots.py

Each picture keeps a hash of the cells that it shows. A test compares it with the notebook, so that a picture that has
become stale is noticed.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from labserver import chromium_page, lab, save_picture
from project import fresh_copy
from test_notebook_browser import IDLE, OUTPUT, WAIT, open_notebook

from mpdemo.paths import root

PICTURES = {  # the notebook, its cells, and what an output says when the picture is taken
    "exercise": ("22_data", ("turn1", "answer1"), "has sample 0"),
    "live": ("12_one_step", ("reference-run",), r"/step 2\d of/"),
}
SETUP = "from mpdemo.notebook.course import check, run"
# whoever deletes only this gets a verdict
TO_DELETE = "...  # delete this line when each sample is read once\n"
MARGIN = 2  # pixels of the page
SCALE = 1.5  # pixels of the picture for each of the page


def path_of(picture) -> Path:
    return root() / "notebooks" / f"{picture}.png"


def notebook_of(picture):
    """Return the picture's notebook, with no other cells than those that it shows."""
    name, ids, _ = PICTURES[picture]
    notebook = nbformat.read(root() / "notebooks" / f"{name}.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in ids]
    return notebook


def digest(picture) -> str:
    """Return a hash of what the notebook's cells say today."""
    return hashlib.sha256(
        "\n".join(cell.source for cell in notebook_of(picture).cells).encode()
    ).hexdigest()


def take(picture, page, server, project):
    """Run a picture's cells, take it when they say what they should, and wait for their end."""
    notebook = notebook_of(picture)
    for cell in notebook.cells:
        cell.source = cell.source.replace(TO_DELETE, "")
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    nbformat.write(notebook, project / "notebooks" / f"{picture}.ipynb")
    open_notebook(page, server, f"{picture}.ipynb", run=True)
    page.keyboard.press("Control+b")  # no list of files beside it
    page.wait_for_selector(f"{OUTPUT} >> text={PICTURES[picture][2]}", timeout=WAIT)
    boxes = [cell.bounding_box() for cell in page.locator(".jp-Notebook .jp-Cell").all()[1:]]
    left, top = boxes[0]["x"] - MARGIN, boxes[0]["y"] - MARGIN
    height = boxes[-1]["y"] + boxes[-1]["height"] + MARGIN - top
    area = {"x": left, "y": top, "width": boxes[0]["width"] + 2 * MARGIN, "height": height}
    save_picture(page.screenshot(clip=area), path_of(picture), 128, cells=digest(picture))
    page.wait_for_selector(IDLE, timeout=WAIT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mpdemo-") as folder:
        project = fresh_copy(folder)
        with lab(project) as server, chromium_page(960, 1000, SCALE) as page:
            for picture in PICTURES:
                take(picture, page, server, project)
                print(path_of(picture), flush=True)

"""JupyterLab in headless Chromium: the live view as a learner meets it.

No page may leave the machine.
"""

import json
import sys
import urllib.request

import nbformat
import pytest
from labserver import NEEDS_CHROMIUM, chromium_page, lab
from project import fresh_copy
from worker_jobs import attach, until

from notebooks import KERNEL, normalise, text_of

pytestmark = NEEDS_CHROMIUM
WAIT = 120_000  # ms; a busy machine needs a part of it to start a kernel
IDLE = "text=Python 3 (ipykernel) | Idle"
OUTPUT = ".jp-OutputArea"
CANCEL = "button.jupyter-button:has-text('Cancel')"

TOY = """
import sys
sys.path.insert(0, "../tests")
from toyjob import ToyJob
from mpdemo.notebook.live_view import follow
"""
AFTER = "print('AFTER', job.state)"
DOLLARS = """
from pathlib import Path
from mpdemo.notebook.show import show
Path("second.sh").write_text("second $A and $B $C and $D")
show("notebooks/second.sh")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return fresh_copy(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def server(project):
    with lab(project) as address:
        yield address


@pytest.fixture(scope="module")
def page(server):
    with chromium_page() as page:
        yield page


@pytest.fixture
def outside(page, server):
    """Every request that leaves the machine while the test runs."""
    requests = []

    def note(request):
        if not request.url.startswith((server[0], "data:", "blob:")):
            requests.append(request.url)

    page.on("request", note)
    yield requests
    page.remove_listener("request", note)
    assert not requests


def write(project, name, cells):
    """Write a notebook with these code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    notebook.metadata.kernelspec = KERNEL
    (project / "notebooks").mkdir(exist_ok=True)
    nbformat.write(notebook, project / "notebooks" / name)


def open_notebook(page, server, name, run=False):
    """Open a notebook in a fresh workspace, wait for its kernel, and run all cells if asked."""
    url, token = server
    page.goto(f"{url}/lab/tree/notebooks/{name}?token={token}&reset")
    page.wait_for_selector(IDLE, timeout=WAIT)
    if run:
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()


def follow_cells(name, steps, status=0):
    job = f'job = ToyJob("../runs/{name}", steps={steps}, pause=0.05, status={status})'
    return [f"{TOY}{job}\nawait follow(job)", AFTER]


def run_cell(page, number):
    """Run one cell."""
    page.locator(".jp-CodeCell .jp-InputArea-editor").nth(number).click()
    page.keyboard.press("Control+Enter")


def color(page) -> str:
    """Return the colour of the view's chart; a chart that was replaced while it was asked has none."""
    chart = page.locator(f"{OUTPUT} svg[role=img]")
    asked = (chart.evaluate("chart => getComputedStyle(chart).color") for _ in range(20))
    return next(filter(None, asked))


def test_jobs_are_live_and_then_pictures(page, server, project, outside, tmp_path):
    """One page: formulas, a job that fails, one that is done, and one that lives through a reload and is cancelled."""
    cells = [
        DOLLARS,
        *follow_cells("failed", 5, status=1),
        *follow_cells("short", 40),
        *follow_cells("long", 4000),
    ]
    write(project, "flow.ipynb", cells)
    open_notebook(page, server, "flow.ipynb", run=True)
    page.wait_for_selector(f"{OUTPUT} >> text=AFTER failed", timeout=WAIT)
    assert page.locator(f"{OUTPUT} pre >> text=the last line").count() == 1
    page.wait_for_selector(f"{OUTPUT} svg[role=img]", timeout=WAIT)
    page.wait_for_selector(f"{OUTPUT} >> text=of 40, loss", timeout=WAIT)
    assert page.locator(f"{OUTPUT} >> text=AFTER done").count() == 0  # the cell below waits for the job
    page.wait_for_selector(f"{OUTPUT} >> text=AFTER done", timeout=WAIT)
    assert page.locator(f"{OUTPUT} img[src^='data:image/png']").count() == 2
    assert page.locator(f"{OUTPUT} pre >> text=second $A and $B $C and $D").count() == 1
    assert page.locator(f"{OUTPUT} mjx-container").count() == 0  # the dollars are no formula

    page.wait_for_selector(f"{OUTPUT} >> text=of 4000, loss", timeout=WAIT)
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=WAIT)
    notebook = nbformat.read(project / "notebooks" / "flow.ipynb", as_version=4)
    assert "widgets" not in notebook.metadata
    assert [set(output.data) for output in notebook.cells[3].outputs] == [{"text/plain", "image/png"}]
    page.reload()  # the cell still runs in the kernel, and the page finds its view there
    page.wait_for_selector(f"{OUTPUT} >> text=of 4000, loss", timeout=WAIT)
    step = page.locator(f"{OUTPUT} >> text=of 4000, loss").first.inner_text()
    # it moves
    page.wait_for_function("text => !document.body.innerText.includes(text)", arg=step, timeout=WAIT)
    light = color(page)
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached", timeout=WAIT)
    assert color(page) != light
    page.screenshot(path=tmp_path / "dark.png")
    assert (tmp_path / "dark.png").stat().st_size > 50_000  # an empty page has a tenth of it

    page.locator(CANCEL).click()
    page.wait_for_selector(f"{OUTPUT} >> text=/long.*cancelled/", timeout=WAIT)
    assert page.locator(f"{OUTPUT} >> text=AFTER cancelled").count() == 0


JOB = """
from pathlib import Path
from mpdemo.notebook.course import run
code = "import time; [(print('line', n, '=' * 300), time.sleep(0.1)) for n in range(3000)]"
Path("../lines.py").exists() or Path("../lines.py").write_text(code)
await run("python lines.py", name="cloned")
"""
# not signed: not trusted
PICTURE = [nbformat.v4.new_output("display_data", {"text/html": "<b>a picture</b>"})]
AT_ITS_END = """
pre => pre.scrollHeight <= pre.clientHeight + 1
    && pre.getBoundingClientRect().bottom <= pre.parentElement.getBoundingClientRect().bottom + 1
"""


@pytest.mark.nightly
def test_a_cloned_notebook_that_is_reloaded_in_the_middle_of_a_job_attaches_and_cancels(
    page, server, project, outside
):
    """Nobody has trusted its saved outputs, so the text of the view says what to do after the reload."""
    write(project, "cloned.ipynb", [JOB, JOB, "'<b>a picture</b>'"])
    file = project / "notebooks" / "cloned.ipynb"
    notebook = nbformat.read(file, as_version=4)
    notebook.cells[2].outputs = PICTURE
    nbformat.write(notebook, file)
    open_notebook(page, server, file.name)
    run_cell(page, 0)
    page.wait_for_selector(f"{OUTPUT} >> text=/line [0-9]{{2}}/", timeout=WAIT)
    assert page.locator(f"{OUTPUT} pre:has-text('=====')").evaluate(AT_ITS_END)  # the newest line is seen
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=WAIT)
    page.reload()
    job = attach(project / "runs" / "cloned")
    said = (
        f"Live view of runs/cloned (job {job.id} on this machine). If this text is all you see, interrupt"
    )
    page.wait_for_selector(f"{OUTPUT} >> text={said}", timeout=WAIT)
    assert page.locator(CANCEL).count() == 0

    def interrupted():
        """Until the page has found its kernel again, the button does nothing; a click too many hits the next cell."""
        page.locator("[data-command='notebook:interrupt-kernel']").first.click()
        page.wait_for_timeout(5000)
        with urllib.request.urlopen(f"{server[0]}/api/sessions?token={server[1]}", timeout=10) as answer:
            sessions = {
                session["path"]: session["kernel"]["execution_state"] for session in json.load(answer)
            }
        return sessions[f"notebooks/{file.name}"] == "idle"

    until(interrupted)
    assert job.state == "running"
    run_cell(page, 1)
    page.wait_for_selector(f"{OUTPUT} pre >> text=line", timeout=WAIT)
    page.locator(CANCEL).click()
    page.wait_for_selector(f"{OUTPUT} >> text=/cloned.*cancelled/", timeout=WAIT)
    assert attach(project / "runs" / "cloned").state == "cancelled"


def test_opening_and_saving_a_notebook_changes_nothing(page, server, project, outside):
    """Its normal form is what JupyterLab writes, on this Python; on another one, that one's version is all."""
    notebook = nbformat.read(project / "notebooks" / "10_two_devices.ipynb", as_version=4)
    notebook.metadata.language_info["version"] = sys.version.split()[0]
    saved, file = text_of(normalise(notebook)), project / "notebooks" / "saved.ipynb"
    file.write_text(saved)
    open_notebook(page, server, file.name)
    moment = file.stat().st_mtime_ns
    page.locator(".jp-Notebook").first.click(position={"x": 5, "y": 5})
    page.keyboard.press("Control+s")
    until(lambda: file.stat().st_mtime_ns != moment)
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=WAIT)
    until(lambda: file.read_text().endswith("}\n"))  # the server writes the file, then its last line's end
    assert file.read_text() == saved

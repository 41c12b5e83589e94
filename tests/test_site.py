"""The site: it is built without a warning, and six of its pages are read on a desk and on a phone."""

import runpy
import shutil
import subprocess
import sys

import nbformat
import pytest
from labserver import NEEDS_CHROMIUM, chromium_page

from mpdemo.paths import root

PAGES = (
    "README",
    "notebooks/21_ddp_by_hand",
    "notebooks/31_microbatches",
    "notebooks/glossary",
    "api",
    "slurm/README",
)
SIZES = {"desk": (1280, 900), "phone": (390, 844)}
TOO_WIDE = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
READABLE = 560  # pixels of a diagram or a wide picture, whose box scrolls on a phone
BROKEN = """() => [...document.images].map(image => image.complete && !image.naturalWidth ? image.src : "")
          .filter(source => source && !source.endsWith(".svg"))"""


def test_a_notebook_of_the_readers_own_is_left_out(tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    own, ours = (tmp_path / "notebooks" / name for name in ("my_own.ipynb", "21_ddp_by_hand.ipynb"))
    nbformat.write(nbformat.v4.new_notebook(), own)
    shutil.copy(root() / "notebooks/21_ddp_by_hand.ipynb", ours)
    runpy.run_path(str(root() / "tests/site/build.py"))["leave_out_others"](tmp_path)
    assert not own.exists() and ours.exists() and "my_own.ipynb is none of" in capsys.readouterr().err


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "tests/site/build.py", "--out", str(out)]
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return out


@pytest.mark.nightly
@NEEDS_CHROMIUM
@pytest.mark.parametrize("size", SIZES)
def test_six_pages_fit_their_window_show_their_pictures_and_ask_nobody_else(site, size):
    outside = []
    with chromium_page(*SIZES[size]) as page:
        page.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:")) or outside.append(request.url),
        )
        for name in PAGES:
            page.goto(f"file://{site}/{name}.html")
            assert page.title() and not page.evaluate(TOO_WIDE), name
            assert page.evaluate(BROKEN) == [], name
            assert page.locator("img:not([alt])").count() == 0, name
        page.goto(f"file://{site}/notebooks/30_two_stages.html")
        assert page.locator(".diagram img").count() == 1 and page.locator("text=mermaid").count() == 0
        assert page.locator("a[href$='glossary.html#autograd']").count() >= 1
        assert page.locator("button.copybtn").count() > 10
        assert (
            "you can" in page.inner_text(".admonition-title")
            and page.locator(".admonition li").count() >= 2
        )
        pictures = page.locator(".diagram img, .cell_output img.wide").all()
        assert len(pictures) > 1 and all(one.bounding_box()["width"] >= READABLE for one in pictures)
        page.wait_for_selector("[data-still]", state="detached")
        page.evaluate("document.body.dataset.theme = 'dark'")
        page.frames[1].wait_for_function("document.documentElement.classList.contains('dark')")
        assert not page.evaluate(TOO_WIDE) and not page.frames[1].evaluate(TOO_WIDE)
    assert outside == []

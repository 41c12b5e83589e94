"""A private JupyterLab on a free port, and a page of the system's Chromium, for the browser tests and the site."""

import contextlib
import io
import json
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from project import environment
from setup_system import find, install_line

START = 60.0  # s
CHROMIUM = find("chromium")
NEEDS_CHROMIUM = pytest.mark.skipif(not CHROMIUM, reason=f"no Chromium; {install_line(['chromium'])}")
QUIET = ("gpu", "quic", "background-networking", "component-update", "sync")
# as root, there is no sandbox
FLAGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{part}" for part in QUIET)]


@contextlib.contextmanager
def chromium_page(width=1280, height=900, scale=1):
    """Yield an empty page of the system's Chromium, without a window; nothing is downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=scale)
        browser.close()


def save_picture(png, path, colours, **texts):
    """Write a screenshot with a palette of so many colours, and with texts that a program can read."""
    note = PngInfo()
    for name, text in texts.items():
        note.add_itxt(name, text)
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(colours).save(path, optimize=True, pnginfo=note)


@contextlib.contextmanager
def lab(folder):
    """Serve `folder`; yield its address and token; stop the server and its kernels at the end."""
    token = secrets.token_hex(16)
    arguments = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", "--ServerApp.port_retries=0"]
    quiet = ["--LabApp.extension_manager=readonly"]  # the other one asks the internet
    env = environment(folder, JUPYTER_TOKEN=token)
    with open(Path(folder) / ".lab.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments, *quiet, f"--ServerApp.root_dir={folder}"],
            cwd=folder,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _wait_until_it_answers(server, Path(env["JUPYTER_RUNTIME_DIR"]), token, Path(log.name)), token
    finally:
        server.send_signal(signal.SIGTERM)  # SIGINT would ask a question on a terminal
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(5)


def _wait_until_it_answers(server, runtime, token, log) -> str:
    end = time.monotonic() + START
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError, ValueError, StopIteration, urllib.error.URLError):
            port = json.loads(next(runtime.glob("jpserver-*.json")).read_text())["port"]
            url = f"http://127.0.0.1:{port}"
            urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=2).read()
            return url
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not answer within {START:.0f} s:\n{log.read_text()[-2000:]}")

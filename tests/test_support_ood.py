"""The app for Open OnDemand, rendered for three sites as the portal would read it; and its JupyterLab lets one in."""

import os
import re
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml
from worker_jobs import until

from mpdemo.paths import root
from mpdemo.world.family import held_port

# Of ERB, the app uses two forms: a value of the form, and lines for GPUs.
FOR_GPUS = re.compile(r"(?m)^ *<%- if gpus.to_i > 0 -%>\n(.*\n) *<%- end -%>\n")
SITES = {"leonardo": "--gres=gpu:2", "lumi_g": "--gpus-per-node=2", "generic": "--gres=gpu:2"}


def as_the_portal(text, **form) -> str:
    """Fill in what somebody chose in the form."""
    text = FOR_GPUS.sub(r"\1" if form["gpus"] else "", text)
    return re.sub(r"<%= (\w+) %>", lambda value: str(form[value[1]]), text)


@pytest.mark.parametrize(("site", "gpus"), SITES.items())
def test_the_app_asks_slurm_for_what_the_site_file_says(tmp_path, call_mpdemo, site, gpus):
    done = call_mpdemo("render", "--site", site, "--ood", tmp_path / "app")
    assert done.returncode == 0 and "not tried on a portal" in done.stdout
    app = {str(file.relative_to(tmp_path / "app")): file for file in (tmp_path / "app").rglob("*.*")}
    assert {*app} == {
        "manifest.yml",
        "form.yml",
        "submit.yml.erb",
        "view.html.erb",
        "template/before.sh.erb",
        "template/script.sh.erb",
    }
    assert yaml.safe_load(app["manifest.yml"].read_text())["role"] == "batch_connect"
    form = yaml.safe_load(app["form.yml"].read_text())
    assert {*form["form"]} >= {*form["attributes"]} and form["attributes"]["gpus"]["max"] > 0
    submit = app["submit.yml.erb"].read_text()
    with_gpus, without = (
        yaml.safe_load(as_the_portal(submit, cores=8, gpus=number))["script"]["native"] for number in (2, 0)
    )
    assert gpus in with_gpus and "--cpus-per-task=8" in with_gpus
    assert not any("gpu" in option for option in without if "partition" not in option)
    assert {*without} <= {*with_gpus} and not any("account" in option for option in with_gpus)
    for script in ("template/before.sh.erb", "template/script.sh.erb"):
        assert subprocess.run(["bash", "-n", app[script]], capture_output=True).stderr == b""
    assert not re.search(r"(?<!\$)\{[a-z_]+\}", "".join(file.read_text() for file in app.values()))


STUBS = (  # what the portal offers to the script
    'find_port() { echo PORT; }; create_passwd() { head -c "$1" /dev/zero | tr "\\0" x; }; host=localhost; '
)


@pytest.mark.nightly
def test_its_jupyterlab_opens_with_the_password_that_the_portal_sends(tmp_path, call_mpdemo):
    assert call_mpdemo("render", "--site", "generic", "--ood", tmp_path).returncode == 0
    held = held_port()
    port = held.getsockname()[1]
    environment = os.environ | {"PATH": f"{root()}/.venv/bin:{os.environ['PATH']}"}
    script = tmp_path / "template/script.sh.erb"
    script.write_text(
        script.read_text().replace(" -l\n", "\n").replace("jupyterlab", "jupyterlab --allow-root")
    )
    begin = STUBS.replace("PORT", str(port)) + f"cd {tmp_path} && source template/before.sh.erb"
    command = ["bash", "-c", f"{begin} && exec bash template/script.sh.erb"]
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        login = f"http://localhost:{port}/node/localhost/{port}/login"
        until(lambda: status(login) == 200)
        assert status(login, password="y" * 24) == 401
        assert status(login, password="x" * 24) == 200
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def status(address, **form) -> int:
    """Return how a server answers to a form, which it follows to the page behind; 0 if there is none yet."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    data = urllib.parse.urlencode(form).encode() if form else None
    try:
        return browser.open(address, data, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0

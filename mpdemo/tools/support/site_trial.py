"""Try a site as far as a login node can: ask Slurm about a job, run the setup lines, start its Python.

`mpdemo env --site NAME` prints what is found here. Taught in notebooks/11_first_job.ipynb.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from dataclasses import dataclass

from packaging.version import Version

from mpdemo.errors import UserError
from mpdemo.jobs.check import check
from mpdemo.jobs.launch_text import FAILED, setup_line
from mpdemo.jobs.spec import JobSpec
from mpdemo.tools.explain.known import with_cause
from mpdemo.world.processes import child_environment

PATIENCE = 180.0  # s for the setup lines and PyTorch together: a slow file system
FOUND = "found by mpdemo:"  # setup lines may print, too
REPORT = f"import sys, torch; print({FOUND!r}, sys.executable, torch.__version__, torch.cuda.device_count(), sep='|')"
OLDEST = {"torch": "2.11", "torchvision": "0.26"}  # as in pyproject.toml


@dataclass(frozen=True)
class Finding:
    """One line of a report; the remedy counts where it is not ok."""

    ok: bool
    text: str
    remedy: str = ""

    def __str__(self):
        return f"[OK]   {self.text}" if self.ok else f"[FAIL] {self.text}\n       remedy: {self.remedy}"


def try_site(site, cluster) -> list[Finding]:
    """Return what is found of a site; `cluster` is the name of the one found here, None where only the file counts."""
    findings = [try_job(site, cluster)]
    if cluster and (site.setup or site.python != "python"):
        findings.append(try_python(site))
    elif site.pytorch:
        findings.append(version(site, site.pytorch, "its file says that its PyTorch is"))
    return findings


def version(site, torch, said) -> Finding:
    """Is a site's PyTorch new enough for this course? A class should know before it stands there."""
    try:
        check_version("torch", torch)
    except UserError as error:
        remedy = f"python -m venv --system-site-packages there, and pip install a newer one; see {site.name}.sbatch"
        return Finding(False, f"site {site.name}: {said} {torch}; {str(error).split('; ')[1]}", remedy)
    return Finding(True, f"site {site.name}: {said} {torch}")


def try_job(site, cluster) -> Finding:
    """Would this site's node, and the Slurm found here, take a job of one process per GPU?"""
    processes = max(1, site.gpus_per_node)
    spec = JobSpec(name="check", command=("-c", "pass"), out="runs/check", processes_per_node=processes)
    text = f"site {site.name}: {site.gpus_per_node} GPUs and {site.cores_per_node} cores per node, by {site.launcher}"
    problems = check(spec, site, ask_slurm=bool(cluster))
    if cluster and site.name != "generic" and cluster not in site.cluster_names:
        text += f" (this cluster is called {cluster!r}, which is not in its cluster_names)"
    if not problems:
        return Finding(True, text)
    file = (
        "a site file of your own (copy generic.sbatch)" if site.name == "generic" else f"{site.name}.sbatch"
    )
    return Finding(
        False, f"{text}; {with_cause(problems[0].message)}", f"{problems[0].fix}; write it into {file}"
    )


def try_python(site) -> Finding:
    """Run the setup lines, then the site's Python with PyTorch; GPUs are counted, though few login nodes have any."""
    lines = [FAILED, *map(setup_line, site.setup), f"{site.python} -c {shlex.quote(REPORT)}"]
    shell = ["bash", *(["-l"] if site.shell.endswith(" -l") else []), "-s"]
    status, said = run_bounded(shell, "\n".join(lines) + "\n")
    reports = [line.split("|")[1:] for line in said.splitlines() if line.startswith(FOUND)]
    if status != 0 or not reports:
        remedy = f"fix its commands or its python in {site.name}.sbatch; "
        remedy += "what exists on compute nodes only: try it in a job"
        return Finding(False, f"site {site.name}: {said.splitlines()[-1]}", remedy)
    python, torch, devices = reports[-1]
    return version(
        site, torch, f"its Python is {python}, which sees {devices} GPUs here, and its PyTorch is"
    )


def run_bounded(command, text, seconds=PATIENCE) -> tuple:
    """Feed a program a text, for some seconds; end what it started; return its status (None: too slow) and output."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        given = {
            "stdin": subprocess.PIPE,
            "stdout": said,
            "stderr": said,
            "env": child_environment("SLURM_CONF"),
        }
        process = subprocess.Popen(command, **given, text=True, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(text, timeout=seconds)
        finally:  # after Ctrl-C, too: it does not reach another session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        late = "" if process.returncode is not None else f"\nno end within {seconds:g} s"
        return process.returncode, (said.read() + late).strip() or "it printed nothing"


def check_version(package, version):
    """Refuse a version older than the course needs."""
    # without the local part of 2.11.0+cu126
    if Version(Version(version).base_version) < Version(OLDEST[package]):
        raise UserError(
            f"{package} {version} is too old; allowed: >={OLDEST[package]}; "
            f"load a newer module (setup in the site file), or pip install --upgrade {package}"
        )

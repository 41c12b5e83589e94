"""Try a site as far as a login node can: ask Slurm about a job, run the setup lines, start its Python.

`python -m mpdemo env --site NAME` prints what is found here. Taught in notebooks/00_start_here.ipynb.
"""

import contextlib
import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs.check import check
from mpdemo.jobs.launch_text import FAILED, setup_line
from mpdemo.jobs.spec import JobSpec
from mpdemo.world.launch import check_version
from mpdemo.world.processes import child_environment

PATIENCE = 180  # s for the setup lines and PyTorch together: a slow file system
QUOTA_LINES = 12  # at most, of what a quota command prints
FOUND = "found by mpdemo:"  # setup lines may print, too
REPORT = f"import sys, torch; print({FOUND!r}, sys.executable, torch.__version__, torch.cuda.device_count(), sep='|')"


@dataclass(frozen=True)
class Finding:
    """One line of a report; the remedy counts where it is not ok."""

    ok: bool
    text: str
    remedy: str = ""

    def __str__(self):
        return f"[OK]   {self.text}" if self.ok else f"[FAIL] {self.text}\n       remedy: {self.remedy}"


def try_site(site, cluster) -> list[Finding]:
    """Return what is found of a site; `cluster` is the name of the one in reach, None where only the file counts."""
    findings = [try_job(site, cluster)]
    if cluster:
        findings += [*try_scratch(site), *try_quota(site)]
    if cluster and (site.setup or site.python != "python"):
        return [*findings, try_python(site)]
    return [*findings, version(site, site.pytorch, "its file says that its PyTorch is")] if site.pytorch else findings


def version(site, torch, said) -> Finding:
    """Is a site's PyTorch new enough for this course? A class should know before it stands there."""
    try:
        check_version("torch", torch)
    except UserError as error:
        remedy = f"python -m venv --system-site-packages there, and pip install a newer one; see {site.name}.toml"
        return Finding(False, f"site {site.name}: {said} {torch}; {str(error).split('; ')[1]}", remedy)
    return Finding(True, f"site {site.name}: {said} {torch}")


def try_job(site, cluster) -> Finding:
    """Would this site's node, and the Slurm in reach, take a job of one process per GPU?"""
    processes = max(1, site.gpus_per_node)
    spec = JobSpec(name="check", command=("-c", "pass"), out="runs/check", processes_per_node=processes)
    text = f"site {site.name}: {site.gpus_per_node} GPUs and {site.cores_per_node} cores per node, by {site.launcher}"
    problems = check(spec, site, ask_slurm=bool(cluster))
    stranger = cluster and site.name != "generic" and cluster not in site.cluster_names
    named = f" (this cluster is called {cluster!r}, which is not in its cluster_names)" if stranger else ""
    if not problems:
        return Finding(True, text + named)
    file = "a site file of your own (copy generic.toml)" if site.name == "generic" else f"{site.name}.toml"
    return Finding(False, f"{text}; {problems[0].message}{named}", f"{problems[0].fix}; write it into {file}")


def try_scratch(site) -> list[Finding]:
    """Is there the folder for large files?"""
    folder = os.path.expandvars(site.scratch)
    why, remedy = f"no folder {folder}", f"mkdir -p {shlex.quote(folder)}"
    if "$" in folder:
        why, remedy = "a variable is not set here", "set it or fix the site file"
    bad = "$" in folder or (folder and not Path(folder).is_dir())
    return [Finding(False, f"scratch {site.scratch!r}: {why}", remedy)] if bad else []


def try_quota(site) -> list[Finding]:
    """Let the site's own command say how much the user may still write; its output is shown as it is."""
    if not site.quota:
        return []
    status, out, err = run_bounded(["bash", "-s"], site.quota + "\n", seconds=30)
    if status in (None, 126, 127):  # too slow, or no such program
        why = "no answer within 30 s" if status is None else (err.strip() or f"exit status {status}").splitlines()[-1]
        return [Finding(False, f"quota {site.quota!r}: {why}", f"fix quota in {site.name}.toml")]
    lines = (out + err).strip().splitlines()[:QUOTA_LINES]
    shown = "\n       ".join([f"quota, as {site.quota!r} prints it:", *lines])
    return [Finding(status == 0, shown, "make room: `quota` ends with another status than 0 where a limit is passed")]


def try_python(site) -> Finding:
    """Run the setup lines, then the site's Python with PyTorch; GPUs are counted, though few login nodes have any."""
    lines = [FAILED, *map(setup_line, site.setup), f"{site.python} -c {shlex.quote(REPORT)}"]
    shell = ["bash", "-l", "-s"] if site.login_shell else ["bash", "-s"]
    status, out, err = run_bounded(shell, "\n".join(lines) + "\n")
    if status is None:
        return Finding(False, f"site {site.name}: its setup took over {PATIENCE} s", "try again: files are cached")
    reports = [line.split("|")[1:] for line in out.splitlines() if line.startswith(FOUND)]
    if status or not reports:
        last = (err.strip() or f"exit status {status}").splitlines()[-1]
        remedy = f"fix setup or python in {site.name}.toml; what exists on compute nodes only: try it in a job"
        return Finding(False, f"site {site.name}: {last}", remedy)
    python, torch, devices = reports[-1]
    return version(site, torch, f"its Python is {python}, which sees {devices} GPUs here, and its PyTorch is")


def run_bounded(command, text, seconds=PATIENCE) -> tuple:
    """Feed a program a text, in a session of its own, for some seconds; return status (None: too slow) and output."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = child_environment("SLURM_CONF")
    process = subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True)
    try:
        out, err = process.communicate(text, timeout=seconds)
        return process.returncode, out, err
    except BaseException as error:  # Ctrl-C, too: it does not reach another session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)  # bounded: a program that waits for a dead disk cannot be killed
        if isinstance(error, subprocess.TimeoutExpired):
            return None, "", ""
        raise

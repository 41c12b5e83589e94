"""``python -m mpdemo env``: what is here, what is missing, and what to do about it.

One line a finding, [OK] or [FAIL], each failure with its remedy. PyTorch is looked at in a process of its own, so the
check works (and helps) where importing it fails.

    python -m mpdemo env                  # this machine
    python -m mpdemo env --site jeanzay   # and a site file
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, check, load_site, slurm

OLDEST_PYTHON = (3, 11)
PROBE = """
import json, torch, torchvision
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
found = {"torch": torch.__version__, "torchvision": torchvision.__version__, "devices": devices}
found["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
found["nccl"] = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print(json.dumps(found))
"""
# What an import of torch or torchvision says when it fails, and what helps.
REMEDIES = {
    "operator torchvision::nms does not exist": "torch and torchvision do not fit together: install both from the same"
    " index, in one command: pip install --force-reinstall torch torchvision",
    "No module named 'torchvision'": "pip install torchvision, from the index that torch came from",
    "No module named 'torch'": "pip install torch torchvision (on a cluster: load the site's module first)",
    "libcudart": "this torch wants CUDA libraries that are not here: load the site's module, or reinstall torch",
    "libtorch": "torch's own libraries are damaged: pip install --force-reinstall torch torchvision",
    "GLIBC": "this torch is built for a newer system: take an older torch, or the site's module",
    "numpy": "pip install --upgrade numpy torch torchvision",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is empty when all is well."""

    ok: bool
    text: str
    remedy: str = ""

    def __str__(self):
        return f"[OK]   {self.text}" if self.ok else f"[FAIL] {self.text}\n       remedy: {self.remedy}"


def add_arguments(parser):
    """Declare ``--site``."""
    parser.add_argument("--site", help="check this site file too (a name in slurm/sites, or a .toml file)")


def main(args) -> int:
    """Print the report; exit status 1 if something needs a remedy."""
    found = findings(args.site)
    print("\n".join(map(str, found)))
    return 0 if all(finding.ok for finding in found) else 1


def findings(site=None) -> list[Finding]:
    """Look at everything a run needs.

    Parameters
    ----------
    site : str, optional
        The site file to check; default: `mpdemo.jobs.load_site`'s choice.

    Returns
    -------
    list of Finding
        Notebook 00 prints them and asserts that every one is ok.

    Raises
    ------
    UserError
        There is no such site, or its file is wrong.
    """
    on_slurm = look_at_slurm()
    if not on_slurm.ok:  # it cannot tell which site this is
        site = site or os.environ.get("MPDEMO_SITE") or "generic"
    chosen = load_site(site)
    return [
        look_at_python(),
        look_at_place(),
        *look_at_torch(),
        on_slurm,
        look_at_site(chosen, on_slurm.ok),
        *look_at_folders(),
    ]


def look_at_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Finding(False, f"Python {version}", f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed")
    return Finding(True, f"Python {version}")


def look_at_place() -> Finding:
    """A front end, a compute node, or one's own machine; what matters is where work may be done."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if "SLURM_JOB_ID" in os.environ:
        return Finding(True, f"inside Slurm job {os.environ['SLURM_JOB_ID']}, on a compute node: {cores} cores")
    return Finding(True, f"not inside a job, so a front end or a machine of your own: {cores} cores")


def look_at_torch() -> list[Finding]:
    """Import PyTorch in a process of its own, and list the devices it sees."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return [Finding(False, "PyTorch did not load within 180 s", "try again: a slow file system caches it")]
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
        return [Finding(False, f"PyTorch does not load: {words}", remedy_for(done.stderr))]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    devices = found["devices"]
    seen = f"{len(devices)} x {devices[0]}" if devices else "no GPU: each process takes one core as its device"
    result = [
        Finding(True, f"PyTorch {found['torch']}, torchvision {found['torchvision']}"),
        Finding(True, f"devices: {seen}"),
    ]
    backend = "nccl" if devices else "gloo"
    if not found[backend]:
        remedy = "this build of torch has none: install torch from pytorch.org or the site's module"
        result.append(Finding(False, f"no {backend}, so processes cannot talk to each other", remedy))
    return result


def remedy_for(words) -> str:
    """Return what helps against an import error of torch or torchvision."""
    general = "reinstall both together: pip install --force-reinstall torch torchvision"
    return next((remedy for pattern, remedy in REMEDIES.items() if pattern in words), general)


def look_at_slurm() -> Finding:
    """Is there a Slurm, and does its controller answer? Having none is fine."""
    try:
        if not slurm.in_reach():
            return Finding(True, "no Slurm in reach: jobs run on this machine, under torchrun")
        name = slurm.configuration().get("ClusterName")
        nodes = slurm.client("sinfo", "-h", "-o", "%D").split()
    except UserError as error:
        return Finding(False, f"Slurm: {error}", "wait, or ask the site; `scontrol ping` says when it is back")
    return Finding(True, f"Slurm: cluster {name}, {sum(map(int, nodes[:1]))} nodes in the first partition")


def look_at_site(site, slurm_answers) -> Finding:
    """Would this site's node take a job of one process a GPU? Where Slurm is in reach, Slurm is asked."""
    processes = max(1, site.gpus_per_node)
    spec = JobSpec(name="check", command=("-c", "pass"), out="runs/check", processes_per_node=processes)
    what = f"site {site.name}: {site.gpus_per_node} GPUs and {site.cores_per_node} cores a node, by {site.launcher}"
    # Slurm is asked only about its own site: on another cluster it would refuse, and rightly.
    ours = slurm_answers and (site.name == "generic" or slurm_is_of(site))
    problems = check(spec, site, ask_slurm=ours)
    if problems:
        where = "a site file of your own (copy generic.toml)" if site.name == "generic" else f"{site.name}.toml"
        return Finding(False, f"{what}; {problems[0].message}", f"{problems[0].fix}; say it in {where}")
    if ours and site.scratch.startswith("$") and not os.environ.get(site.scratch.strip("${}")):
        return Finding(False, f"{what}; {site.scratch} is not set here", "set it, or change scratch in the site file")
    return Finding(True, what)


def slurm_is_of(site) -> bool:
    try:
        return slurm.in_reach() and slurm.cluster_name() in site.cluster_names
    except UserError:
        return False


def look_at_folders() -> list[Finding]:
    """Where runs are written and where data may lie."""
    runs = paths.root() / "runs"
    nearest = runs if runs.exists() else paths.root()
    if os.access(nearest, os.W_OK):
        free = shutil.disk_usage(nearest).free / 2**30
        result = [
            Finding(
                free > 0.5, f"runs are written to {runs.name}/ ({free:.0f} GiB free)", "make room, or move the project"
            )
        ]
    else:
        result = [Finding(False, f"{nearest} cannot be written to", "copy the project to a folder of your own")]
    for name in ("MPDEMO_DATA", "DSDIR"):
        folder = os.environ.get(name)
        if folder:
            remedy = f"unset {name}, or set it to a folder that exists"
            result.append(Finding(Path(folder).is_dir(), f"data: {name}={folder}", remedy))
    return result

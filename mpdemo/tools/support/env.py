"""``mpdemo env``: checks Python, PyTorch, Slurm, the site file and the folders.

One line per finding, [OK] or [FAIL], each failure with its remedy. The site is tried by
`mpdemo.tools.support.site_trial`. In a job of several processes, rank 0 also prints one row per rank (roll_call.py).
PyTorch is imported in a process of its own, so the check works (and helps) where that import fails.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError, error_line
from mpdemo.jobs import load_site, slurm
from mpdemo.tools.explain.known import known_in
from mpdemo.tools.support.site_trial import Finding, check_version, try_site
from mpdemo.world.devices import too_few_gpus

PYTORCH_REPORT = """
import json, torch, torchvision
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
report = {"torch": torch.__version__, "torchvision": torchvision.__version__, "devices": devices}
report["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
report["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl and devices else ""
print(json.dumps(report))
"""
NO_GPU = "no GPU: each process takes one core as its device"
INSTALL = "pip install torch torchvision, from one index (on a cluster: load the site's module first)"
REINSTALL = "reinstall both together: pip install --force-reinstall torch torchvision"


def add_arguments(parser):
    """Declare ``--site``."""
    parser.add_argument(
        "--site", help="check this site file too (a name in slurm/sites, or a .sbatch file)"
    )


def main(args) -> int:
    """Print the report; exit status 1 if something needs a remedy."""
    ranks = check_ranks(args.site)
    if ranks is None:  # not rank 0
        return 0
    report = [*findings(args.site), *ranks]
    print(*report, sep="\n")
    return 0 if all(finding.ok for finding in report) else 1


def check_ranks(site=None) -> list[Finding] | None:
    """Return one row per rank and what is wrong, in rank 0; None in the others; nothing without a launcher."""
    if not {"RANK", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():
        return []
    try:
        from mpdemo.tools.support import roll_call
    except ImportError:  # `check_pytorch` says why
        return []
    try:
        rows = roll_call.roll_call()
    except RuntimeError as error:  # of PyTorch: a rank that is missing, or cannot be reached
        remedy = "look for errors of other ranks; check MASTER_ADDR, MASTER_PORT and the network interface"
        return [Finding(False, f"the ranks do not meet: {error_line(error)}", remedy)]
    if rows is None:
        return None
    whole_nodes = False
    with contextlib.suppress(UserError):  # `findings` says what is wrong with a site file
        whole_nodes = load_site(site).gives("exclusive")
    trouble = [Finding(False, *pair) for pair in roll_call.what_is_wrong(rows, whole_nodes)]
    links = [Finding(True, f"{row['host']}: {row['topology']}") for row in rows if row["topology"]]
    return [Finding(True, f"one row per rank:\n{roll_call.table(rows)}"), *links, *trouble]


def findings(site) -> list[Finding]:
    """Check everything a run needs, and a site file, by default the choice of `mpdemo.jobs.load_site`."""
    slurm_finding, cluster = check_slurm()
    if not slurm_finding.ok:  # it cannot tell which site this is
        site = site or os.environ.get("MPDEMO_SITE") or "generic"
    site = load_site(site)
    version = ".".join(map(str, sys.version_info[:3]))
    place = "not inside a job, so a login node or your own machine"
    if number := os.environ.get("SLURM_JOB_ID"):
        place = f"inside Slurm job {number}, on a compute node (new jobs are queued)"
    return [
        Finding(sys.version_info >= (3, 11), f"Python {version}", "Python 3.11 or newer is needed"),
        Finding(True, f"{place}: {len(os.sched_getaffinity(0))} cores"),
        *check_pytorch(),
        slurm_finding,
        *try_site(site, cluster),
        *check_folders(),
    ]


def check_pytorch() -> list[Finding]:
    """Can PyTorch be imported, which devices does it see, and can processes communicate?"""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PYTORCH_REPORT], capture_output=True, text=True, timeout=180
        )
    except subprocess.TimeoutExpired:
        return [
            Finding(False, "PyTorch did not load within 180 s", "try again: a slow file system caches it")
        ]
    if done.returncode:
        error = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        known = known_in(error)
        remedy = known.explained(error)[1] if known else REINSTALL
        if "No module named 'torch" in error:
            remedy = INSTALL
        return [Finding(False, f"PyTorch does not load: {error}", remedy)]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    devices = report["devices"]
    device = f"{len(devices)} x {devices[0]}, nccl {report['nccl'] or 'none'}" if devices else NO_GPU
    device += ", too few to compare with: jobs on this machine take CPU cores" if too_few_gpus(1) else ""
    versions = Finding(True, f"PyTorch {report['torch']}, torchvision {report['torchvision']}")
    try:
        for package in ("torch", "torchvision"):
            check_version(package, report[package])
    except UserError as error:
        problem, _, remedy = str(error).rpartition("; ")
        versions = Finding(False, f"{versions.text}: {problem}", remedy)
    backend = "nccl" if devices else "gloo"
    remedy = "this build of torch has none: install torch from pytorch.org or the site's module"
    silent = (
        []
        if report[backend]
        else [Finding(False, f"no {backend}, so processes cannot communicate", remedy)]
    )
    return [versions, Finding(True, f"devices: {device}"), *silent]


def check_slurm() -> tuple[Finding, str | None]:
    """Is there a Slurm, and does its controller answer? Having none is fine. Returns the cluster's name, too."""
    try:
        if not slurm.in_reach():
            return Finding(True, f"{slurm.none_in_reach()}: jobs run on this machine"), None
        cluster = slurm.configuration().get("ClusterName")
        nodes = slurm.client("sinfo", "-h", "-o", "%D").strip() or "0"
    except UserError as error:
        return Finding(
            False, f"Slurm: {error}", "wait, or ask the site; `scontrol ping` says when it is back"
        ), None
    return Finding(True, f"Slurm: cluster {cluster}, {nodes} nodes"), cluster


def check_folders() -> list[Finding]:
    """Can runs be written, is there room for them, and do the folders exist that the environment names for data?"""
    runs = paths.root() / "runs"
    nearest = runs if runs.exists() else paths.root()
    free = shutil.disk_usage(nearest).free / 2**30
    found = Finding(
        free > 0.5, f"runs are written to runs/ ({free:.0f} GiB free)", "make room, or move the project"
    )
    if not os.access(nearest, os.W_OK):
        found = Finding(
            False, f"{nearest} cannot be written to", "copy the project to a folder of your own"
        )
    data = {name: os.environ[name] for name in ("MPDEMO_DATA", "DSDIR") if os.environ.get(name)}
    remedy = "unset {0}, or set it to a folder that exists"
    named = [
        Finding(Path(path).is_dir(), f"data: {name}={path}", remedy.format(name))
        for name, path in data.items()
    ]
    return [found, *named]

"""The same training in several sizes, one job after the other: what more devices bring, and what they cost.

In strong scaling the global batch stays the same; in weak scaling each device's share of it does. All jobs train on
equally many images, so they differ in the number of steps. This runs in the notebook itself: the jobs that it submits
are plain training runs. Taught in notebooks/09_scaling.ipynb.
"""

import itertools
import os
import time
from statistics import median

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, attach, load_site, slurm, submit, train_command
from mpdemo.notebook.recipe import recipe
from mpdemo.paired import LEAST_ROUNDS, ratio, to_row
from mpdemo.plan.scaling import FEWEST, Run, fit

KINDS = "strong", "weak"
WARMUP = 2  # steps that are not counted: DDP settles its buckets, caches fill
LEAST_STEPS = WARMUP + LEAST_ROUNDS
COLUMNS = {  # of a row: its heading, its format
    "scaling": ("scaling", ""),
    "devices": ("devices", ""),
    "batch": ("batch", ""),
    "steps": ("steps", ""),
    "images_per_second": ("images/s", ".0f"),
    "speedup": ("speed-up", ".2f"),
    "efficiency": ("efficiency", ".0%"),
    "loss": ("loss", ".3f"),
}


def sizes_here(wanted, processes_per_node=1) -> tuple:
    """Return those numbers of nodes that there are: Slurm's, or those that this machine has cores for."""
    site = load_site()
    if slurm.in_reach():
        partition = ["-p", site.partition] if site.partition else []
        most = len(set(slurm.client("sinfo", "-h", "-N", "-o", "%N", *partition).split()))
    else:
        most = len(os.sched_getaffinity(0)) // processes_per_node
    return tuple(size for size in wanted if size <= most)


def specs(nodes, batch, images, name, processes_per_node=1, time_limit="00:10:00", **settings) -> dict:
    """Return a job for each kind of scaling and number of nodes: ``("weak", 2)`` -> `mpdemo.jobs.JobSpec`.

    Parameters
    ----------
    nodes : sequence of int
        Rising; the smallest is the reference, belongs to both kinds and runs once.
    batch, images : int
        Images of a step over all devices of the smallest size, and images that every job trains on.
    name : str
        The jobs are ``NAME_strong_1`` and so on, their folders ``runs/NAME_strong_1``.
    processes_per_node, time_limit
        Of every job, as in a `mpdemo.jobs.JobSpec`.
    **settings
        Settings of the training that differ from those of the course model.
    """
    if not nodes or nodes[0] < 1 or list(nodes) != sorted(set(nodes)):
        raise UserError(f"nodes {tuple(nodes)} are not allowed; allowed: rising numbers, such as (1, 2, 4)")
    jobs = {}
    for kind, size in itertools.product(KINDS, nodes):
        if kind == "weak" and size == nodes[0]:  # the same job as in strong scaling
            continue
        devices = size * processes_per_node
        of_step = batch if kind == "strong" else batch * size // nodes[0]
        if of_step % devices or images % of_step or images // of_step < LEAST_STEPS:
            raise UserError(
                f"{images} images in batches of {of_step} on {devices} devices ({kind} scaling) do not divide into "
                f"equal shares and {LEAST_STEPS} steps or more; do: another batch size or number of images"
            )
        job = f"{name}_{kind}_{size}"
        own = {"batch_size": of_step, "epochs": None, "steps": images // of_step, "log_every": 1, "out": f"runs/{job}"}
        training = recipe("single" if devices == 1 else "ddp", **{"warmup_steps": WARMUP} | settings | own)
        command = train_command(**training)
        jobs[kind, size] = JobSpec(job, command, f"runs/{job}", size, processes_per_node, time_limit=time_limit)
    return jobs


def run_all(jobs, wait=3600.0) -> dict:
    """Run the jobs of `specs`, one after the other, for `wait` seconds in all; return them as `mpdemo.jobs.Job`.

    A second call runs only what has not ended well. `JobFailed`: one failed. `TimeoutError`: time is over, and the one
    that runs continues.
    """
    done = {}
    end = time.monotonic() + wait
    for size, spec in jobs.items():
        job = done[size] = submit(spec, resubmit=has_failed(spec))
        left = max(0.0, end - time.monotonic())
        try:
            job.wait(left, left)
        except TimeoutError:
            still = f"job {job.id} ({spec.name}) is still {job.state} after {wait:g} s"
            raise TimeoutError(f"{still}; do: the same again, which resumes with what has ended well") from None
        job.result()  # raises its error if it failed
    return done


def has_failed(spec) -> bool:
    """Whether the job of an earlier call has ended, and not well: its result is no use."""
    try:
        job = attach(spec.out)
    except UserError:  # there was no such call
        return False
    return job.finished and job.state != "done"


def report(done) -> dict:
    """Return what the jobs of `run_all` measured: ``rows``, one per kind and size, the smallest in both, and ``fit``.

    By kind, ``fit`` is a `mpdemo.plan.scaling.Model` as a dict, or None if there are fewer sizes than a fit needs.
    """
    rows, fits = [], {}
    reference = next(iter(done.values()))
    for kind in KINDS:
        jobs = [job for (kind_of_job, _), job in done.items() if kind_of_job == kind or job is reference]
        own = [{"scaling": kind} | measure(job, reference) for job in jobs]
        images = own[0]["batch"] * own[0]["steps"]
        runs = [Run(row["devices"], images / row["images_per_second"], row["batch"]) for row in own]
        fits[kind] = vars(fit(runs, images)) if len(runs) >= FEWEST else None
        rows += own
    return {"rows": rows, "fit": fits}


def measure(job, reference) -> dict:
    """Return what a job tells: its steps, also beside those of a reference, and its cost.

    Steps of one number are paired, as rounds are. But the jobs ran one after the other: the interval says how much the
    steps vary, not what changed on the machine between the jobs.
    """
    summary = job.result()
    devices = summary["world_size"]
    seconds, first = seconds_of_an_image(job), seconds_of_an_image(reference)
    paired = min(len(seconds), len(first))
    speedup = ratio(first[:paired], seconds[:paired])
    return {
        "devices": devices,
        "batch": summary["settings"]["batch_size"],
        "steps": summary["steps"],
        "images_per_second": 1 / median(seconds),
        **to_row("speedup", speedup),
        "efficiency": speedup.median * reference.result()["world_size"] / devices,
        "loss": summary["validation_loss"],
        "device_hours": devices * job.run_time / 3600,
    }


def seconds_of_an_image(job) -> list[float]:
    """Return the seconds per image of every step of a job, without the warm-up."""
    steps = [row for row in job.metrics() if row["event"] == "step"]
    return [1 / step["images_per_second"] for step in steps[WARMUP:]]


def table(report) -> str:
    """Return the rows of a report as text."""
    texts = [[format(row[name], form) for name, (_, form) in COLUMNS.items()] for row in report["rows"]]
    headings = [heading for heading, _ in COLUMNS.values()]
    align = ["left", *["right"] * (len(COLUMNS) - 1)]
    return tabulate(texts, headings, "plain", colalign=align, disable_numparse=True)

"""``python -m mpdemo scale``: what more nodes bring, and what they cost, measured by real jobs.

    python -m mpdemo scale --site jeanzay --nodes 1,2,4 --processes-per-node 4
    python -m mpdemo scale --nodes 1,2                     without a Slurm: 1 and 2 processes of this machine

One job per size, one after the other, on the same images; a second call resumes where the first one was stopped.
Taught in notebooks/08_scaling.ipynb.
"""

import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, JobSpec, Site, attach, check, load_site, slurm, submit, train_command
from mpdemo.notebook.recipe import recipe
from mpdemo.options import count
from mpdemo.trainers.report import LEAST_STEPS, WARMUP, gather, sentences, show_table

__all__ = ["Experiment", "gather", "run_jobs", "sentences", "show_table", "sizes_here"]
KINDS = "strong", "weak"
TRAINING = {"model": "transformer", "dataset": "digits", "data": None, "precision": "fp32"}


@dataclass(frozen=True)
class Experiment:
    """What is to be compared: in strong scaling the global batch stays the same, in weak scaling a device's share.

    Attributes
    ----------
    nodes : tuple of int
        Rising; the smallest is the reference, belongs to both kinds and runs once.
    batch, images : int
        Images of a step over all devices of the smallest size, and images that every job trains on.
    name : str
        The jobs are ``NAME_strong_1`` and so on, their folders ``runs/NAME_strong_1``.
    changes : dict, optional
        Settings of the training that differ from those of the course model.
    """

    nodes: tuple
    batch: int = 64
    images: int = 3072
    name: str = "scale"
    processes_per_node: int = 1
    kinds: tuple = KINDS
    time_limit: str = "00:10:00"
    changes: dict | None = None

    def __post_init__(self):
        if not self.nodes or self.nodes[0] < 1 or list(self.nodes) != sorted(set(self.nodes)):
            given = ",".join(map(str, self.nodes))
            raise UserError(f"nodes {given} are not allowed; allowed: rising numbers, such as 1,2,4")
        for kind, size in itertools.product(self.kinds, self.nodes):
            batch, devices = self.batch_of(kind, size), size * self.processes_per_node
            if batch % devices or self.images % batch or self.images // batch < LEAST_STEPS:
                raise UserError(
                    f"{self.images} images in batches of {batch} on {devices} devices ({kind} scaling) do not divide "
                    f"into equal shares and {LEAST_STEPS} steps or more; do: another batch size or number of images"
                )

    def batch_of(self, kind, nodes) -> int:
        """Return the images of a step over all devices."""
        return self.batch if kind == "strong" else self.batch * nodes // self.nodes[0]

    def specs(self) -> dict:
        """Return the jobs, by kind and number of nodes; the smallest is one of the first kind."""
        specs, shape = {}, {"processes_per_node": self.processes_per_node, "time_limit": self.time_limit}
        for kind, nodes in itertools.product(self.kinds, self.nodes):
            batch, name = self.batch_of(kind, nodes), f"{self.name}_{kind}_{nodes}"
            rung = "single" if nodes * self.processes_per_node == 1 else "ddp"
            steps = {"batch_size": batch, "epochs": None, "steps": self.images // batch, "log_every": 1}
            settings = recipe(rung, **{"warmup_steps": WARMUP} | (self.changes or {}) | steps, out=f"runs/{name}")
            if kind == self.kinds[0] or nodes != self.nodes[0]:
                specs[kind, nodes] = JobSpec(name, train_command(**settings), f"runs/{name}", nodes, **shape)
        return specs


def sizes_here(wanted, site=None, processes_per_node=1) -> tuple:
    """Return those numbers of nodes that there are: of Slurm's, or of this machine's cores."""
    site = site if isinstance(site, Site) else load_site(site)
    if slurm.in_reach():
        partition = ["-p", site.partition] if site.partition else []
        most = len(set(slurm.client("sinfo", "-h", "-N", "-o", "%N", *partition).split()))
    else:
        most = len(os.sched_getaffinity(0)) // processes_per_node
    return tuple(size for size in wanted if size <= most)


def run_jobs(experiment, site=None, wait=3600.0) -> dict:
    """Run the jobs, one after the other. What cannot run is refused before the first one.

    Parameters
    ----------
    experiment : Experiment
    site : Site or str, optional
    wait : float
        Seconds for all of them.

    Returns
    -------
    dict
        Kind and number of nodes -> Job.

    Raises
    ------
    JobFailed, TimeoutError
        One failed; or time is over, and the one that runs continues.
    """
    site = site if isinstance(site, Site) else load_site(site)
    specs, processes, done, end = experiment.specs(), experiment.processes_per_node, {}, time.monotonic() + wait
    here = sizes_here(experiment.nodes, site, processes)
    if here != experiment.nodes:
        wanted = f"{experiment.nodes[-1]} nodes with {processes} processes each are too many"
        raise UserError(f"{wanted}; here fit: {','.join(map(str, here)) or 'none'}; do: fewer")
    for (kind, nodes), spec in specs.items():
        if problems := check(spec, site):
            raise UserError(f"{nodes} nodes ({kind} scaling): " + "; ".join(map(str, problems)))
    for size, spec in specs.items():
        done[size] = submit(spec, site, resubmit=has_failed(spec))
        left = max(0.0, end - time.monotonic())
        try:
            done[size].wait(left, left)
        except TimeoutError:
            still = f"job {done[size].id} ({spec.name}) is still {done[size].state} after {wait:g} s"
            raise TimeoutError(f"{still}; do: the same again, which resumes with what has ended well") from None
        done[size].result()  # its error, if it failed
    return done


def has_failed(spec) -> bool:
    """Whether the job of an earlier call has not ended well, as after Ctrl-C: its result is no use."""
    try:
        job = attach(spec.out)
    except UserError:  # there was no such call
        return False
    return job.finished and job.state != "done"


def add_arguments(parser):
    """Declare the arguments of ``mpdemo scale``."""
    option = parser.add_argument
    option("--nodes", default="1,2,4", help="rising; the others are compared with the first (1,2,4)")
    option("--site", help="a name in slurm/sites (default: as for jobs)")
    option("--processes-per-node", type=count(1, 1000), default=1, help="one per GPU; all sizes have the same (1)")
    option("--scaling", choices=("both", *KINDS), default="both", help="strong: same global batch; weak: same share")
    for name, default in TRAINING.items():
        option(f"--{name}", default=default, help=f"as for train ({default})")
    option("--image-size", type=count(1, 10_000), help="pixels per side, as for train")
    option("--workers", type=count(0, 1000), default=0, help="loader processes of each process, as for train")
    option("--batch-size", type=count(1, 10**7), default=64, help="images per step, all processes of the smallest size")
    option("--images", type=count(1, 10**9), default=3072, help="images that each job trains on (3072)")
    option("--time-limit", default="00:10:00", help="of each job, HH:MM:SS (00:10:00)")
    option("--wait", type=count(1, 10**7), default=3600, help="seconds for all jobs; on Slurm they run on (3600)")
    option("--out", default="runs/scale", help="folder for the report; the jobs' folders begin so (runs/scale)")


def main(args) -> int:
    """Run the jobs, print and save the report; return the exit status."""
    from mpdemo.notebook.plots import scaling  # loads matplotlib, which an import of this module for its jobs need not

    site, experiment = load_site(args.site), experiment_of(args)
    try:
        done = run_jobs(experiment, site, args.wait)
    except (JobFailed, TimeoutError) as error:
        print(f"mpdemo: {error}", file=sys.stderr)
        return 1
    report = gather(experiment, done) | {"site": site.name}
    folder = paths.root() / args.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    scaling(report).save(folder / "scaling.png")
    print("", show_table(report), "", *sentences(report), f"saved {args.out}/report.json, scaling.png", sep="\n")
    return 0


def experiment_of(args) -> Experiment:
    """Return the experiment that the options ask for."""
    try:
        nodes = tuple(int(number) for number in args.nodes.split(","))
    except ValueError:
        raise UserError(f"--nodes {args.nodes!r} is not allowed; allowed: rising numbers, such as 1,2,4") from None
    out = Path(args.out)
    if out.is_absolute() or out.parent != Path("runs"):
        raise UserError(f"--out {args.out} is not allowed; allowed: a folder in runs, such as runs/scale")
    kinds = KINDS if args.scaling == "both" else (args.scaling,)
    changes = {name: vars(args)[name] for name in (*TRAINING, "image_size", "workers")}
    shape = (args.processes_per_node, kinds, args.time_limit)
    return Experiment(nodes, args.batch_size, args.images, out.name, *shape, changes)

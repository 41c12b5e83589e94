"""``python -m mpdemo scale``: what more nodes bring, and what they cost, measured by real jobs.

    python -m mpdemo scale --site jeanzay --nodes 1,2,4 --processes-per-node 4
    python -m mpdemo scale --nodes 1,2                     without a Slurm: 1 and 2 processes of this machine

One job per size, one after the other, on the same images; a second call resumes where the first one was stopped. In
strong scaling the global batch stays the same, in weak scaling the share of one device. The smallest size belongs to
both and runs once. Taught in notebooks/08_scaling.ipynb.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mpdemo import paths
from mpdemo.cluster.command import count
from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, JobSpec, Site, attach, check, load_site, slurm, submit, train_command
from mpdemo.notebook.story import story
from mpdemo.plan.scaling_advice import EFFICIENCY
from mpdemo.trainers.course import run_at_once
from mpdemo.trainers.report import LEAST_STEPS, WARMUP, gather, sentences, show_table

__all__ = ["Experiment", "gather", "run_jobs", "sentences", "show_table", "sizes_here"]
KINDS = "strong", "weak"


@dataclass(frozen=True)
class Experiment:
    """What is to be compared.

    Attributes
    ----------
    nodes : tuple of int
        Rising; the smallest is the reference.
    batch : int
        Images of a step over all devices of the smallest size.
    images : int
        That every job trains on, counted with repetitions.
    name : str
        The jobs are ``NAME_strong_1`` and so on, their folders ``runs/NAME_strong_1``.
    kinds : tuple of str
        "strong", "weak" or both.
    changes : dict, optional
        Settings of the training that differ from those of the course model.
    """

    nodes: tuple
    batch: int = 64
    images: int = 1536
    name: str = "scale"
    processes_per_node: int = 1
    kinds: tuple = KINDS
    time_limit: str = "00:10:00"
    oversubscribe: bool = False
    changes: dict | None = None

    def __post_init__(self):
        if not self.nodes or self.nodes[0] < 1 or list(self.nodes) != sorted(set(self.nodes)):
            given = ",".join(map(str, self.nodes))
            raise UserError(f"nodes {given} are not allowed; allowed: rising numbers, such as 1,2,4")
        for kind, size in ((kind, size) for kind in self.kinds for size in self.nodes):
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
        sizes = {kind: self.nodes if kind == self.kinds[0] else self.nodes[1:] for kind in self.kinds}
        return {(kind, nodes): self._spec(kind, nodes) for kind in self.kinds for nodes in sizes[kind]}

    def _spec(self, kind, nodes):
        batch, name = self.batch_of(kind, nodes), f"{self.name}_{kind}_{nodes}"
        rung = "single" if nodes * self.processes_per_node == 1 else "ddp"
        steps = {"batch_size": batch, "epochs": None, "steps": self.images // batch, "log_every": 1}
        settings = story(rung, **{"warmup_steps": WARMUP} | (self.changes or {}) | steps, out=f"runs/{name}")
        shape = {"nodes": nodes, "processes_per_node": self.processes_per_node, "oversubscribe": self.oversubscribe}
        command = train_command(**settings)
        return JobSpec(name=name, command=command, out=f"runs/{name}", time_limit=self.time_limit, **shape)


def sizes_here(wanted, site=None, processes_per_node=1) -> tuple:
    """Return those numbers of nodes that there are: of Slurm, of the job around us for its steps, or of cores."""
    site = site if isinstance(site, Site) else load_site(site)
    if site.inside_a_job == "steps" and "SLURM_JOB_ID" in os.environ:
        most = int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    elif slurm.in_reach():
        partition = ["-p", site.partition] if site.partition else []
        most = len(set(slurm.client("sinfo", "-h", "-N", "-o", "%N", *partition).split()))
    else:
        most = len(os.sched_getaffinity(0)) // processes_per_node
    return tuple(size for size in wanted if size <= most)


def run_jobs(experiment, site=None, at_once=1, wait=3600.0, again=False, scripts=None) -> dict:
    """Submit the jobs, at most `at_once` at a time, and wait for all. What cannot run is refused before the first one.

    Parameters
    ----------
    experiment : Experiment
    site : Site or str, optional
    at_once : int
        Jobs that may wait or run at the same time. On one machine more than one would disturb each other.
    wait : float
        Seconds for all of them.
    again : bool
        Run a job again although its folder has its result.
    scripts : str, optional
        Folder for the job files, as ``"slurm"``; default: each run's own.

    Returns
    -------
    dict
        Kind and number of nodes -> Job.

    Raises
    ------
    JobFailed
        One of them; those that run are cancelled, and no other is submitted.
    TimeoutError
        They have not ended within `wait` seconds. A cluster goes on with those that were submitted.
    """
    site = site if isinstance(site, Site) else load_site(site)
    specs, processes, started = experiment.specs(), experiment.processes_per_node, {}
    here = sizes_here(experiment.nodes, site, processes)
    if here != experiment.nodes and not experiment.oversubscribe:
        wanted = f"{experiment.nodes[-1]} nodes with {processes} processes each are too many"
        raise UserError(f"{wanted}; here fit: {','.join(map(str, here)) or 'none'}; do: fewer, or oversubscribe")
    for (kind, nodes), spec in specs.items():
        if problems := check(spec, site):
            raise UserError(f"{nodes} nodes ({kind} scaling): " + "; ".join(map(str, problems)))

    def start(size):
        spec = specs[size]
        script = f"{scripts}/{spec.name}.sbatch" if scripts else None
        started[size] = submit(spec, site, script=script, resubmit=again or has_failed(spec))
        return started[size]

    try:
        for _, job in run_at_once(specs, start, at_once, wait):
            if job.state != "done":
                for other in (other for other in started.values() if not other.finished):
                    other.cancel()
            job.result()  # its error, if it failed
    except TimeoutError:
        late = ", ".join(f"{job.name} ({job.state})" for job in started.values() if not job.finished)
        later = "later the same command resumes with what has ended well"
        raise TimeoutError(f"{late} not ended after {wait:g} s; {later}") from None
    return {size: started[size] for size in specs}


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
    for name, default in {"model": "transformer", "dataset": "digits", "data": None, "precision": "fp32"}.items():
        option(f"--{name}", default=default, help=f"as for train ({default})")
    option("--image-size", type=count(1, 10_000), help="pixels per side, as for train")
    option("--workers", type=count(0, 1000), default=0, help="loader processes of each process, as for train")
    option("--batch-size", type=count(1, 10**7), default=64, help="images per step, all processes of the smallest size")
    option("--images", type=count(1, 10**9), default=1536, help="images that each job trains on (1536)")
    option("--efficiency", type=float, default=EFFICIENCY, help=f"that the advice asks for ({EFFICIENCY})")
    option("--time-limit", default="00:10:00", help="of each job, HH:MM:SS (00:10:00)")
    option("--at-once", type=count(1, 1000), default=1, help="jobs that may wait or run at the same time (1)")
    option("--wait", type=count(1, 10**7), default=3600, help="seconds for all jobs; Slurm goes on with them (3600)")
    option("--again", action="store_true", help="run jobs again that have already ended")
    option("--oversubscribe", action="store_true", help="without a Slurm: more processes here than there are cores")
    option("--out", default="runs/scale", help="folder for the report; the jobs' folders begin so (runs/scale)")


def main(args) -> int:
    """Run the jobs, print and save the report; return the exit status."""
    site, experiment = load_site(args.site), experiment_of(args)
    try:
        done = run_jobs(experiment, site, args.at_once, args.wait, args.again)
    except (JobFailed, TimeoutError) as error:
        print(f"mpdemo: {error}", file=sys.stderr)
        return 1
    report = gather(experiment, done, args.efficiency) | {"site": site.name}
    write(report, paths.root() / args.out)
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
    if not 0 < args.efficiency <= 1:
        raise UserError(f"--efficiency {args.efficiency} is not allowed; allowed: above 0, at most 1")
    kinds = KINDS if args.scaling == "both" else (args.scaling,)
    changes = {name: vars(args)[name] for name in ("model", "dataset", "data", "image_size", "precision", "workers")}
    more = {"time_limit": args.time_limit, "oversubscribe": args.oversubscribe, "changes": changes}
    return Experiment(nodes, args.batch_size, args.images, out.name, args.processes_per_node, kinds, **more)


def write(report, folder):
    """Write report.json and the picture."""
    from mpdemo.notebook import plots

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    plots.scaling(report).save(folder / "scaling.png")

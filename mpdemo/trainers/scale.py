"""``python -m mpdemo scale``: what more nodes bring, and what they cost, measured by real jobs.

    python -m mpdemo scale --site jeanzay --nodes 1,2,4 --processes-per-node 4
    python -m mpdemo scale --nodes 1,2                     without a Slurm: 1 and 2 processes of this machine

One job per size, one after the other, on the same images; a second call resumes where the first one was stopped.
Taught in notebooks/08_scaling.ipynb.
"""

import json
import sys
from pathlib import Path

from mpdemo import paths
from mpdemo.cluster.command import count
from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, Site, attach, check, load_site, submit
from mpdemo.plan.scaling import EFFICIENCY
from mpdemo.trainers.course import run_at_once
from mpdemo.trainers.experiment import KINDS, Experiment, sizes_here
from mpdemo.trainers.report import gather, sentences, show_table

__all__ = ["Experiment", "gather", "run_jobs", "sentences", "show_table", "sizes_here"]


def run_jobs(experiment, site=None, at_once=1, wait=3600.0, again=False, scripts=None) -> dict:
    """Submit the jobs, at most `at_once` at a time, and wait for all. What cannot run is refused before the first one.

    Parameters
    ----------
    experiment : Experiment
    site : Site or str, optional
    at_once, wait : int and float
        Jobs that may wait or run at the same time (on one machine, two disturb each other); seconds for all of them.
    again : bool
        Run a job again although its folder has its result.
    scripts : str, optional
        Folder for the batch scripts, as ``"slurm"``; default: each run's own.

    Returns
    -------
    dict
        Kind and number of nodes -> Job.

    Raises
    ------
    JobFailed, TimeoutError
        One failed, and those that run are cancelled; or time is over, and on a cluster those that run continue.
    """
    site = site if isinstance(site, Site) else load_site(site)
    specs, processes, started = experiment.specs(), experiment.processes_per_node, {}
    here = sizes_here(experiment.nodes, site, processes)
    if here != experiment.nodes and not experiment.oversubscribe:
        wanted = f"{experiment.nodes[-1]} nodes with {processes} processes each are too many"
        raise UserError(f"{wanted}; here fit: {','.join(map(str, here)) or 'none'}; do: fewer")
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
    option("--wait", type=count(1, 10**7), default=3600, help="seconds for all jobs; on Slurm they run on (3600)")
    option("--again", action="store_true", help="run jobs again that have already ended")
    option("--oversubscribe", action="store_true", help="without a Slurm: more processes here than there are cores")
    option("--out", default="runs/scale", help="folder for the report; the jobs' folders begin so (runs/scale)")


def main(args) -> int:
    """Run the jobs, print and save the report; return the exit status."""
    from mpdemo.notebook.plots import scaling  # loads matplotlib, which an import of this module for its jobs need not

    site, experiment = load_site(args.site), experiment_of(args)
    try:
        done = run_jobs(experiment, site, args.at_once, args.wait, args.again)
    except (JobFailed, TimeoutError) as error:
        print(f"mpdemo: {error}", file=sys.stderr)
        return 1
    report = gather(experiment, done, args.efficiency) | {"site": site.name}
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
    if not 0 < args.efficiency <= 1:
        raise UserError(f"--efficiency {args.efficiency} is not allowed; allowed: above 0, at most 1")
    kinds = KINDS if args.scaling == "both" else (args.scaling,)
    changes = {name: vars(args)[name] for name in ("model", "dataset", "data", "image_size", "precision", "workers")}
    more = {"time_limit": args.time_limit, "oversubscribe": args.oversubscribe, "changes": changes}
    return Experiment(nodes, args.batch_size, args.images, out.name, args.processes_per_node, kinds, **more)

"""The jobs of a scaling experiment: one for each size, so many at once, the same images in each.

In strong scaling the global batch stays the same, in weak scaling the share of one device. The smallest size belongs
to both and runs once.
"""

import os
import time
from dataclasses import dataclass

from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, Site, attach, check, load_site, slurm, submit, train_command
from mpdemo.jobs.allocation import nodes_held, surrounding_job
from mpdemo.jobs.submit import check_here, cluster_of_jobs
from mpdemo.notebook.story import story
from mpdemo.scale.energy import rapl_joules, used

WARMUP = 2  # steps that are not counted: DDP settles its buckets, caches fill
LEAST_STEPS = WARMUP + 3
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
    changes : dict, optional
        Settings of the training that differ from the story's.
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
        nodes = self.nodes
        if not nodes or nodes[0] < 1 or list(nodes) != sorted(set(nodes)):
            raise UserError(
                f"nodes {','.join(map(str, nodes))} are not allowed; allowed: rising numbers, such as 1,2,4"
            )
        for kind, size in ((kind, size) for kind in self.kinds for size in nodes):
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
        return {
            (kind, nodes): self._spec(kind, nodes)
            for kind in self.kinds
            for nodes in (self.nodes if kind == self.kinds[0] else self.nodes[1:])
        }

    def _spec(self, kind, nodes):
        batch, name = self.batch_of(kind, nodes), f"{self.name}_{kind}_{nodes}"
        rung = "single" if nodes * self.processes_per_node == 1 else "ddp"
        steps = {"batch_size": batch, "epochs": None, "steps": self.images // batch, "log_every": 1}
        settings = story(rung, **{"warmup_steps": WARMUP} | (self.changes or {}) | steps, out=f"runs/{name}")
        return JobSpec(
            name=name,
            command=train_command(**settings),
            out=f"runs/{name}",
            nodes=nodes,
            processes_per_node=self.processes_per_node,
            time_limit=self.time_limit,
            oversubscribe=self.oversubscribe,
        )


def sizes_here(wanted, site=None) -> tuple:
    """Return those numbers of nodes that there are: of Slurm, of the job around us for its steps, or of cores."""
    site = site if isinstance(site, Site) else load_site(site)
    if surrounding_job(site):
        most = nodes_held() or 1
    elif slurm.in_reach():
        partition = site.partition
        lines = slurm.client("sinfo", "-h", "-N", "-o", "%N", *(["-p", partition] if partition else []))
        most = len(set(lines.split()))
    else:
        most = len(os.sched_getaffinity(0))
    return tuple(size for size in wanted if size <= most)


def refuse_early(experiment, site=None):
    """Refuse what one of the jobs cannot do, before the first is submitted."""
    site = site if isinstance(site, Site) else load_site(site)
    for (kind, nodes), spec in experiment.specs().items():
        if problems := check(spec, site):
            raise UserError(f"{nodes} nodes ({kind} scaling): " + "; ".join(map(str, problems)))
        if cluster_of_jobs(site) is None:
            check_here(spec, site)


def run_jobs(experiment, site=None, at_once=1, wait=3600.0, again=False, scripts=None) -> dict:
    """Submit the jobs, at most `at_once` at a time, and wait for all.

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
        Kind and number of nodes -> (Job, joules or None).

    Raises
    ------
    JobFailed
        One of them; those that run are cancelled, and no other is submitted.
    TimeoutError
        They have not ended within `wait` seconds. A cluster goes on with those that were submitted.
    """
    refuse_early(experiment, site)
    end, waiting, started, done = time.monotonic() + wait, list(experiment.specs().items()), {}, {}
    while waiting or started:
        if waiting and len(started) < at_once:
            size, spec = waiting.pop(0)
            before = rapl_joules() if at_once == 1 else None
            script = f"{scripts}/{spec.name}.sbatch" if scripts else None
            job = submit(spec, site, script=script, resubmit=again or has_failed(spec))
            started[size] = job, None if job.finished else before  # one of an earlier call has been found
        for size in [size for size, (job, _) in started.items() if job.finished]:
            job, before = started.pop(size)
            if job.state != "done":
                for other, _ in started.values():
                    other.cancel()
            job.result()  # its error, if it failed
            done[size] = job, used(job, before)
        if started and time.monotonic() > end:
            names = ", ".join(f"{job.name} ({job.state})" for job, _ in started.values())
            later = "later the same command goes on with what has ended well"
            raise TimeoutError(f"{names} not ended after {wait:g} s; {later}")
        time.sleep(0.05)
    return done


def has_failed(spec) -> bool:
    """Whether the job of an earlier call has ended otherwise than well, as after Ctrl-C: its result is no use."""
    try:
        job = attach(spec.out)
    except UserError:  # there was no such call
        return False
    return job.finished and job.state != "done"

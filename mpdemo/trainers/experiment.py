"""The jobs of a scaling experiment: one per size, on the same images.

In strong scaling the global batch stays the same, in weak scaling the share of one device. The smallest size belongs to
both and runs once.
"""

import itertools
import os
from dataclasses import dataclass

from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, Site, load_site, slurm, train_command
from mpdemo.notebook.recipe import recipe

KINDS = "strong", "weak"
WARMUP = 2  # steps that are not counted: DDP settles its buckets, caches fill
LEAST_STEPS = WARMUP + 3


@dataclass(frozen=True)
class Experiment:
    """What is to be compared.

    Attributes
    ----------
    nodes : tuple of int
        Rising; the smallest is the reference.
    batch, images : int
        Images of a step over all devices of the smallest size, and images that every job trains on.
    name : str
        The jobs are ``NAME_strong_1`` and so on, their folders ``runs/NAME_strong_1``.
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
        sizes = itertools.product(self.kinds, self.nodes)
        return {size: self._spec(*size) for size in sizes if size[0] == self.kinds[0] or size[1] != self.nodes[0]}

    def _spec(self, kind, nodes):
        batch, name = self.batch_of(kind, nodes), f"{self.name}_{kind}_{nodes}"
        rung = "single" if nodes * self.processes_per_node == 1 else "ddp"
        steps = {"batch_size": batch, "epochs": None, "steps": self.images // batch, "log_every": 1}
        settings = recipe(rung, **{"warmup_steps": WARMUP} | (self.changes or {}) | steps, out=f"runs/{name}")
        shape = {"nodes": nodes, "processes_per_node": self.processes_per_node, "oversubscribe": self.oversubscribe}
        return JobSpec(name, train_command(**settings), f"runs/{name}", time_limit=self.time_limit, **shape)


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

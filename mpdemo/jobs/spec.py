"""What a learner requests: a job, described once, for Slurm and for this machine."""

import dataclasses
import re
from pathlib import PurePosixPath

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from mpdemo.errors import one_line_errors
from mpdemo.jobs import slurm
from mpdemo.jobs.site import Launcher, Line, Site, TimeLimit
from mpdemo.options import as_arguments
from mpdemo.settings import Settings

OTHER_JOBS = r"(after|afterany|afterok|afternotok)(:\d+)+(,(after|afterany|afterok|afternotok)(:\d+)+)*|singleton"


@one_line_errors()
@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class JobSpec:
    """A job: a command, the processes that run it together, and the devices they get.

    Raises
    ------
    UserError
        An unknown field, or a value that is not allowed.

    Examples
    --------
    >>> spec = JobSpec(name="toy", command=("-c", "print(1)"), out="runs/toy", nodes=2, processes_per_node=4)
    >>> spec.world_size, spec.gpus_per_node
    (8, 4)
    """

    name: Line = Field(min_length=1, description="the name in the queue")
    command: tuple[Line, ...] = Field(description="the arguments after `python`, the same for every process")
    out: Line = Field(description="the run's folder below the project's root: log, metrics, the job's number")
    nodes: int = Field(1, ge=1, description="world size = nodes x processes_per_node")
    processes_per_node: int = Field(1, ge=1)
    gpus_per_process: int = Field(1, ge=0, description="more than 1 for a process that drives several devices itself")
    cpus_per_process: int | None = Field(None, ge=1, description="None: its GPUs' share of the node's cores")
    time_limit: TimeLimit = Field("00:10:00", min_length=1, description="HH:MM:SS; Slurm ends the job after it")
    launcher: Launcher | None = Field(None, description="srun or torchrun; None: the site's")
    stage: Line | None = Field(None, min_length=1, description="a folder: each node copies it to its disk, MPDEMO_DATA")
    oversubscribe: bool = Field(False, description="without a Slurm: more processes here than there are cores")
    requeue: bool = Field(False, description="queue it again if it stopped with a checkpoint (status 3) or lost a node")
    least_nodes: int | None = Field(None, ge=1, description="when nodes fail, continue with so many; torchrun alone")
    dependency: str | None = Field(None, description="'afterok:7' starts it once job 7 has ended well; Slurm only")
    signal: str | None = Field(None, description="'USR1@60' sends SIGUSR1 to every process 60 s before the time limit")

    @field_validator("command", mode="before")
    @classmethod
    def _as_texts(cls, command):
        if isinstance(command, str) or not command:
            raise ValueError("is not allowed; allowed: the arguments after `python`, as ('-m', 'mpdemo', 'train')")
        return tuple(str(argument) for argument in command)

    @field_validator("out", mode="before")
    @classmethod
    def _is_below_the_root(cls, out):
        out = str(out)
        path = PurePosixPath(out)
        if "\\" in out:  # in a log's file name it switches off Slurm's %j
            raise ValueError("holds a backslash; take it out")
        if path.is_absolute() or ".." in path.parts or out.startswith("~") or path == PurePosixPath("."):
            raise ValueError("is not allowed; allowed: a folder below the project's root, as in runs/03_ddp")
        return out

    @field_validator("least_nodes")
    @classmethod
    def _is_not_above_the_nodes(cls, least_nodes, info):
        if least_nodes is not None and least_nodes >= info.data.get("nodes", least_nodes + 1):
            raise ValueError(f"leaves no node to lose; allowed: fewer than nodes={info.data['nodes']}")
        return least_nodes

    @field_validator("dependency")
    @classmethod
    def _names_other_jobs(cls, dependency):
        if dependency is not None and not re.fullmatch(OTHER_JOBS, dependency, re.ASCII):
            raise ValueError(
                "is not allowed; allowed: afterok, afterany, afternotok or after, with numbers: afterok:7:8"
            )
        return dependency

    @field_validator("signal")
    @classmethod
    def _is_before_the_limit(cls, signal, info):
        if signal is None or "time_limit" not in info.data:  # without it, the time limit's own error is reported
            return signal
        match = re.fullmatch(r"(USR1|USR2|TERM|INT)@(\d{1,5})", signal, re.ASCII)
        if not match:
            raise ValueError("is not allowed; allowed: NAME@SECONDS with USR1, USR2, TERM or INT, as in USR1@60")
        limit = slurm.limit(info.data["time_limit"])
        if int(match[2]) >= limit:
            raise ValueError(f"comes before the start; the time limit is only {limit} s")
        return signal

    @property
    def world_size(self) -> int:
        """How many processes work together."""
        return self.nodes * self.processes_per_node

    @property
    def devices(self) -> int:
        """How many devices all processes drive."""
        return self.world_size * self.gpus_per_process

    @property
    def tasks_per_node(self) -> int:
        """Slurm's tasks: the processes themselves, or the one torchrun that starts them."""
        return 1 if self.launcher == "torchrun" else self.processes_per_node

    @property
    def gpus_per_node(self) -> int:
        """GPUs to request on each node (where the site has any)."""
        return self.processes_per_node * self.gpus_per_process

    def on(self, site: Site) -> "JobSpec":
        """The job as it runs on a site: with the site's launcher and, where nodes have one GPU, a node per process."""
        spread = site.gpus_per_node == self.gpus_per_process == 1
        return dataclasses.replace(
            self,
            launcher=self.launcher or site.launcher,
            nodes=self.world_size if spread else self.nodes,
            processes_per_node=1 if spread else self.processes_per_node,
        )

    def cpus_on(self, site: Site) -> int:
        """CPUs of each process: what was requested; else its share of the cores per GPU; else the site's per device."""
        if self.cpus_per_process is not None:
            return self.cpus_per_process
        gpus = site.gpus_per_node
        share = (max(1, site.cores_per_node // gpus) if gpus else site.cpus_per_process) * max(1, self.gpus_per_process)
        return min(share, max(1, site.cores_per_job // self.world_size)) if site.cores_per_job else share

    def cpus_per_task(self, site: Site) -> int:
        """CPUs of each of Slurm's tasks."""
        return self.cpus_on(site) * self.processes_per_node // self.tasks_per_node


def train_command(**settings) -> tuple:
    """Return the command of a training run, for `JobSpec`.

    Parameters
    ----------
    **settings
        The options of ``python -m mpdemo train``: ``batch_size=128`` becomes ``--batch-size 128``, ``True`` a bare
        option; ``None`` and ``False`` leave it out; a list is joined with commas.

    Raises
    ------
    UserError
        An unknown name or a wrong value, as `mpdemo.settings.Settings`.

    Examples
    --------
    >>> train_command(rung="ddp", batch_size=128, cut=[2, 4])
    ('-m', 'mpdemo', 'train', '--rung', 'ddp', '--batch-size', '128', '--cut', '2,4')
    """
    values = {name: ",".join(map(str, v)) if isinstance(v, list | tuple) else v for name, v in settings.items()}
    Settings(**values)  # refuses an unknown name or a wrong value here, not only on the compute node
    return ("-m", "mpdemo", "train", *as_arguments(values))

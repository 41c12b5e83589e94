"""What a learner requests: a job, described once, for Slurm and for this machine."""

from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, one_line_errors
from mpdemo.jobs import slurm
from mpdemo.jobs.site import Launcher, Line, TimeLimit
from mpdemo.options import as_arguments
from mpdemo.settings import Settings


def as_texts(command: Any) -> Any:
    """Return the words of a command, which may be numbers, as texts; a text is no list of words."""
    return tuple(map(str, command)) if isinstance(command, list | tuple) else command


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
    command: Annotated[tuple[Line, ...], BeforeValidator(as_texts)] = Field(
        min_length=1, description="the arguments after `python`, the same for every process"
    )
    out: Annotated[Line, BeforeValidator(str)] = Field(
        description="the run's folder below the project's root: log, metrics, the job's number"
    )
    nodes: int = Field(1, ge=1, description="world size = nodes x processes_per_node")
    processes_per_node: int = Field(1, ge=1)
    gpus_per_process: int = Field(1, ge=0, description="more than 1 for a process that drives several devices itself")
    cpus_per_process: int | None = Field(None, ge=1, description="None: its GPUs' share of the node's cores")
    time_limit: TimeLimit = Field("00:10:00", min_length=1, description="HH:MM:SS; Slurm ends the job after it")
    launcher: Launcher | None = Field(None, description="srun or torchrun; None: the site's")
    oversubscribe: bool = Field(False, description="without a Slurm: more processes here than there are cores")
    requeue: bool = Field(False, description="queue it again if it stopped with a checkpoint (status 3) or lost a node")
    signal: str | None = Field(
        None,
        pattern=r"^(USR1|USR2|TERM|INT)@[0-9]{1,5}$",
        description="'USR1@60' sends SIGUSR1 to every process 60 s before the time limit",
    )

    def __post_init__(self) -> None:
        path = PurePosixPath(self.out)
        if path.is_absolute() or {"..", "~"} & set(path.parts) or str(path) == "." or "\\" in self.out:
            allowed = "a folder below the project's root, as runs/03_ddp, with no backslash in its name"
            raise UserError(f"out {self.out!r} is not allowed; allowed: {allowed}")
        if self.signal and int(self.signal.partition("@")[2]) >= slurm.limit(self.time_limit):
            raise UserError(f"signal {self.signal!r} comes before the start; time_limit is only {self.time_limit}")

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


def train_command(**settings: Any) -> tuple[str, ...]:
    """Return the command of a training run, for `JobSpec`.

    Parameters
    ----------
    **settings
        Options of ``mpdemo train``: ``batch_size=128`` becomes ``--batch-size 128``, ``True`` a bare option;
        ``None`` and ``False`` leave it out; a list is joined with commas.

    Raises
    ------
    UserError
        An unknown name or a wrong value: here, not only on the compute node.
    """
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values[name] = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    Settings(**values)
    return ("-m", "mpdemo", "train", *as_arguments(values))

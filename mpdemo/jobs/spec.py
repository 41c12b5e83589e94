"""What a learner asks for: a job, said once, for Slurm and for this machine."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from mpdemo.errors import UserError
from mpdemo.jobs.site import LAUNCHERS, Site, seconds

SIGNAL = re.compile(r"(USR1|USR2|TERM|INT)@(\d{1,5})", re.ASCII)


@dataclass(frozen=True)
class JobSpec:
    """A job: a command, the processes that run it together, and the devices they get.

    Parameters
    ----------
    name : str
        What the queue shows.
    command : tuple of str
        The arguments after ``python``, as from `train_command`. Every process runs the same command.
    out : str
        The run's folder, relative to the project's root: log, metrics, the job's number.
    nodes, processes_per_node : int
        Machines, and processes on each. World size = nodes x processes_per_node.
    gpus_per_process : int
        0 for none; more than 1 for a process that drives several devices by itself.
    cpus_per_process : int, optional
        CPUs of each process; by default the GPUs' share of the site's cores.
    time_limit : str
        ``HH:MM:SS``; Slurm ends the job after it.
    launcher : {"srun", "torchrun"}, optional
        One Slurm task a process, or one torchrun a node. Default: the site's.
    requeue : bool
        Put the job in the queue again when it stopped with a checkpoint (exit status 3) or lost its node.
    signal : str, optional
        A warning before the end: ``"USR1@60"`` sends SIGUSR1 to every process 60 s before the time limit.

    Raises
    ------
    UserError
        A value that cannot be.

    Examples
    --------
    >>> spec = JobSpec(name="toy", command=("-c", "print(1)"), out="runs/toy", nodes=2, processes_per_node=4)
    >>> spec.world_size, spec.gpus_per_node
    (8, 4)
    """

    name: str
    command: tuple
    out: str
    nodes: int = 1
    processes_per_node: int = 1
    gpus_per_process: int = 1
    cpus_per_process: int | None = None
    time_limit: str = "00:10:00"
    launcher: str | None = None
    requeue: bool = False
    signal: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "out", str(self.out))
        if isinstance(self.command, str) or not self.command:
            raise UserError(
                f"command = {self.command!r}; it takes the arguments after `python`, as ('-m', 'mpdemo', 'train')"
            )
        object.__setattr__(self, "command", tuple(str(word) for word in self.command))
        lowest = {"nodes": 1, "processes_per_node": 1, "gpus_per_process": 0, "cpus_per_process": 1}
        for field, low in lowest.items():
            value = getattr(self, field)
            if value is None and field == "cpus_per_process":
                continue
            if type(value) is not int or value < low:
                raise UserError(f"{field} = {value!r}; it takes a whole number of at least {low}")
        for what, text in [("name", self.name), ("out", self.out), *(("command", word) for word in self.command)]:
            check_text(what, text)
        check_folder(self.out)
        limit = seconds(self.time_limit)
        if self.launcher not in (None, *LAUNCHERS):
            raise UserError(f"launcher = {self.launcher!r}; allowed: {', '.join(LAUNCHERS)}, or None for the site's")
        if self.signal is not None:
            match = SIGNAL.fullmatch(self.signal)
            if not match:
                raise UserError(
                    f"signal = {self.signal!r}; allowed: NAME@SECONDS with USR1, USR2, TERM or INT, as in USR1@60"
                )
            if int(match[2]) >= limit:
                raise UserError(f"signal = {self.signal!r} comes before the start; the time limit is only {limit} s")

    @property
    def world_size(self) -> int:
        """How many processes work together."""
        return self.nodes * self.processes_per_node

    @property
    def gpus_per_node(self) -> int:
        """GPUs to ask for on each node (where the site has any)."""
        return self.processes_per_node * self.gpus_per_process

    def cpus_on(self, site: Site) -> int:
        """CPUs of each process: what was asked for, else the GPUs' share of the node's cores."""
        if self.cpus_per_process is not None:
            return self.cpus_per_process
        if site.gpus_per_node == 0:
            return max(1, site.cores_per_node // self.processes_per_node)
        return site.cpus_per_gpu * max(1, self.gpus_per_process)

    def as_dict(self) -> dict:
        """The spec as plain values, as it is written in the run's folder."""
        return dataclasses.asdict(self)


def check_text(what, text):
    """Refuse what no line of a script can carry; everything else is quoted."""
    if not isinstance(text, str) or not text and what != "command":
        raise UserError(f"{what} = {text!r}; it takes a text that is not empty")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise UserError(f"{what} = {text!r} holds a line break or another control character; take it out")


def check_folder(out):
    """The run's folder lies inside the project."""
    path = PurePosixPath(out)
    if "\\" in out:  # in a log's file name it switches off Slurm's %j
        raise UserError(f"out = {out!r} holds a backslash; take it out")
    if path.is_absolute() or ".." in path.parts or out.startswith("~") or path == PurePosixPath("."):
        raise UserError(f"out = {out!r}; it takes a folder below the project's root, as in runs/03_ddp")


def train_command(**settings) -> tuple:
    """Return the command of a training, for `JobSpec`.

    Parameters
    ----------
    **settings
        The options of ``python -m mpdemo train``: ``batch_size=128`` becomes ``--batch-size 128``, ``True`` a bare
        option; ``None`` and ``False`` leave it out; a list is joined with commas.

    Examples
    --------
    >>> train_command(rung="ddp", batch_size=128, cut=[2, 4])
    ('-m', 'mpdemo', 'train', '--rung', 'ddp', '--batch-size', '128', '--cut', '2,4')
    """
    words = ["-m", "mpdemo", "train"]
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return tuple(words)

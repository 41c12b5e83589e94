"""What a learner requests: a job, described once, for Slurm and for this machine.

`spec_of` reads it from the line that a terminal takes in the project's folder: ``torchrun``, ``python`` or ``mpdemo``.
On several nodes the line counts for each node, and the batch script adds what srun and torchrun need there.
"""

import re
import shlex
import zlib
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, did_you_mean, one_line_errors, text_of
from mpdemo.jobs import slurm
from mpdemo.jobs.site import Launcher, Line, TimeLimit
from mpdemo.options import LineParser, add_options, options_from
from mpdemo.settings import RUNGS, Settings, checked, is_per_device

COURSE, RUNG = ("-m", "mpdemo"), "mpdemo.rungs."
# What a shell would not hand on as it is written: the beginning of its syntax where nothing quotes it.
SHELL = re.compile(
    r"[();<>|&\r\n`]+|\$[\w{(@*#?$!'-]\w*}?|[*?]|\[[^\s\]]+\]|\{[^\s{}]*(?:,|\.\.)[^\s{}]*\}|(?<![^\s=:])~|(?<!\S)#"
)
QUOTED = re.compile(r"""'[^']*'|"((?:\\.|[^"\\])*)"|\\.""", re.DOTALL)
# `same` starts two processes itself, and `explain` only reads.
NEEDS = {"same": {"cpus_per_process": 2}, "explain": {"gpus_per_process": 0}}


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
    gpus_per_process: int = Field(
        1, ge=0, description="more than 1 for a process that drives several devices itself"
    )
    cpus_per_process: int | None = Field(
        None, ge=1, description="None: its GPUs' share of the node's cores"
    )
    time_limit: TimeLimit = Field(
        "00:10:00", min_length=1, description="HH:MM:SS; Slurm ends the job after it"
    )
    launcher: Launcher | None = Field(None, description="srun or torchrun; None: the site's")
    oversubscribe: bool = Field(
        False, description="without a Slurm: more processes here than there are cores"
    )
    signal: str | None = Field(
        None,
        pattern=r"^(USR1|USR2|TERM|INT)@[0-9]{1,5}$",
        description="'USR1@60' sends SIGUSR1 to every process 60 s before the time limit",
    )

    def __post_init__(self) -> None:
        path = PurePosixPath(self.out)
        if (
            path.is_absolute()
            or {"..", "~"} & set(path.parts)
            or str(path) in (".", "runs")
            or "\\" in self.out
        ):
            allowed = "a folder below the project's root, as runs/23_two, with no backslash in its name"
            raise UserError(f"out {self.out!r} is not allowed; allowed: {allowed}")
        if self.signal and int(self.signal.partition("@")[2]) >= slurm.limit(self.time_limit):
            raise UserError(
                f"signal {self.signal!r} comes before the start; time_limit is only {self.time_limit}"
            )

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


def spec_of(command: str, nodes: int = 1, name: str | None = None, **words: Any) -> JobSpec:
    """Return the job of a command; see `mpdemo.notebook.course.run`, which also takes `nodes`, `name` and `words`.

    Raises
    ------
    UserError
        Another program, an option of torchrun that the batch script writes, more than one command, what a shell would
        replace, or a bad name.
    """
    program, *rest = words_of(command)
    JobSpec("a", ("a",), "a", nodes=nodes)  # refuses a bad number, before the next lines compute with it
    if isinstance(name, str) and name and not {"", ".", "..", "~"}.isdisjoint(name.split("/")):
        raise UserError(
            f"name {name!r} is not allowed; allowed: what can name a folder in runs/, as 23_two"
        )
    if program == "torchrun":
        arguments, processes = by_torchrun(rest, nodes)
        words = {"launcher": "torchrun", "processes_per_node": processes} | words
    else:
        arguments = (*COURSE, *rest) if program == "mpdemo" else tuple(rest)
    rung = of_rung(arguments)
    if rung:
        words = {
            "out": rung.out,
            "gpus_per_process": 1 if is_per_device(rung) else checked(rung).devices,
        } | words
        name = name or rung.out.rpartition("/")[2]
    of_course = arguments[2] if arguments[:2] == COURSE else ""
    words = {"launcher": "srun"} | NEEDS.get(of_course, {}) | words
    if arguments == ("-m",):
        raise UserError(f"{program} -m: which module?")
    what = of_course or Path(arguments[arguments[0] == "-m"]).name.removesuffix(".py").rpartition(".")[
        2
    ].strip("-")
    what = re.sub(r"[\x00-\x1f\x7f]", "", what)
    name = name or f"{what}-{zlib.crc32(f'{nodes} {command}'.encode(errors='replace')) & 0xFFFF:04x}"
    spec = JobSpec(**{"name": name, "command": arguments, "out": f"runs/{name}", "nodes": nodes} | words)
    if rung:  # whose options are refused before it waits in a queue
        checked(rung, None if program == "python" and spec.world_size == 1 else spec.world_size)
    return spec


def words_of(command) -> list[str]:
    """Return the words of one command, as a shell splits it; refuse what a shell would replace or act on."""
    command = text_of(command, "what run takes, as 'python train.py',")
    line = command.replace("\\\n", " ").strip()
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UserError(f"{command!r}: {error}") from None
    if strange := SHELL.search(QUOTED.sub(unquoted, line)):
        instead = "write what it stands for, or put it in single quotes"
        raise UserError(f"run takes one command, without a shell's {strange[0]!r}; {instead}: {command!r}")
    if len(words) < 2 or words[0] not in ("torchrun", "python", "mpdemo"):
        raise UserError(f"run starts torchrun, python or mpdemo, with what follows it; not {command!r}")
    return words


def unquoted(match) -> str:
    """Return what a shell replaces in a quoted text: in double quotes, variables and commands."""
    return f"'{' '.join(re.findall(r'[$][{(]?[0-9A-Za-z_@*#?$!-]+}?|`', match[1] or ''))}'"


def by_torchrun(words, nodes) -> tuple:
    """Return what torchrun starts, and in how many processes on each node."""
    parser = LineParser(prog="torchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1)
    parser.add_argument("-m", action="store_true")
    parser.add_argument("program", nargs="...")
    given, unknown = parser.parse_known_args(words)
    if unknown:
        why = "on several nodes the batch script writes the others: run(..., nodes=2)"
        raise UserError(f"torchrun {unknown[0]}: run takes --standalone, --nproc-per-node and -m; {why}")
    if given.standalone and nodes > 1:
        raise UserError(f"torchrun --standalone stays on one node; leave it out with nodes={nodes}")
    if not given.program:
        raise UserError("torchrun: which script?")
    return (*["-m"][: given.m], *given.program), given.nproc_per_node


def of_rung(arguments) -> Settings | None:
    """Return the settings of a strategy's own program, ``-m mpdemo.rungs.ddp``; None for another one."""
    if arguments[0] != "-m" or not "".join(arguments[1:2]).startswith(RUNG):
        return None
    module, options = arguments[1], arguments[2:]
    rung = module.removeprefix(RUNG)
    if rung not in RUNGS:
        raise UserError(
            f"no module {module}; there are {RUNG}{{{','.join(RUNGS)}}}{did_you_mean(rung, RUNGS)}"
        )
    parser = LineParser(prog=module, add_help=False)
    add_options(parser, Settings, without=("rung",))
    settings = options_from(parser.parse_args(options), Settings, rung=rung)
    return replace(settings, out=settings.out or f"runs/train_{rung}")

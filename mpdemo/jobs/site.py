"""Site files: the batch script of a cluster, with holes for what differs from job to job, ``slurm/sites/NAME.sbatch``.

Support staff have such a script already, and a learner reads there what Slurm will read. Lines that begin with ``#:``
are facts in TOML: what a node has, and how a program starts there. ``generic.sbatch`` explains facts and holes. Those
of ``slurm/sites/community`` are found by their names in the same way.
"""

import dataclasses
import functools
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mpdemo import paths
from mpdemo.errors import UserError, did_you_mean, one_line_errors
from mpdemo.jobs import slurm

# What `mpdemo.jobs.sbatch_text` fills in. Elsewhere in a line, braces are the shell's.
IN_DIRECTIVES = (
    "name",
    "nodes",
    "tasks",
    "job_tasks",
    "gpus",
    "task_gpus",
    "job_gpus",
    "cpus",
    "time",
    "signal",
)
IN_COMMANDS = ("course", "first_node", "environment", "devices", "launch")
HOLE = re.compile(r"(?<!\$)\{([a-z_]+)\}")
FACT, DIRECTIVE = "#:", "#SBATCH"


def one_line(text) -> str:
    """Refuse what no line of a script can carry; everything else is quoted."""
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError("holds a line break or another control character; write one line per text")
    if text != text.encode(errors="ignore").decode():
        raise ValueError("holds a byte that is no character; rename what is called so")
    return text


def time_limit(text) -> str:
    """Refuse a time limit that Slurm could not read; an empty text is none."""
    if text:
        slurm.limit(text)
    return text


Line = Annotated[str, AfterValidator(one_line)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]  # TOML has lists, a dataclass tuples
TimeLimit = Annotated[str, AfterValidator(time_limit)]
Launcher = Literal["srun", "torchrun"]


@one_line_errors()
@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Site:
    """A cluster: its batch script, and the facts from which its holes are filled."""

    name: Line = Field(description="the file's name")
    text: str = ""
    cluster_names: Lines = ()
    cores_per_node: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    cores_per_job: int = Field(0, ge=0)
    max_time: TimeLimit = ""
    launcher: Launcher = "srun"
    python: Line = "python"
    pytorch: str = Field("", pattern=r"^(\d+\.\d+\S*)?$")
    srun_options: Lines = ()
    ranks_on_front_end: bool = True
    polling_seconds: float = Field(5, ge=1, strict=False)

    @property
    def shell(self) -> str:
        """The first line: which shell, and whether as a login shell."""
        return self.text.partition("\n")[0]

    @property
    def lines(self) -> list[str]:
        """The lines from the first directive on: what stands above is about the file."""
        lines = self.text.splitlines()
        first = next((k for k, line in enumerate(lines) if line.startswith(DIRECTIVE)), len(lines))
        return [line for line in lines[first:] if not line.startswith(FACT)]

    @property
    def setup(self) -> list[str]:
        """The site's own commands, as ``module load pytorch``."""
        return [line for line in self.lines if line.strip() and line[0] != "#" and not holes(line)]

    def gives(self, option: str) -> bool:
        """Whether each job has the directive `option`, as ``exclusive``."""
        return any(re.match(rf"{DIRECTIVE} --{option}\b", line) for line in self.lines)


def holes(line) -> list[str]:
    """Return the names of a line's holes."""
    return [name for name in HOLE.findall(line) if name in IN_COMMANDS or line.startswith(DIRECTIVE)]


def load_site(name: str | Path | None = None) -> Site:
    """Read a site file, with the variables of its directives (``--account=$COURSE_ACCOUNT``) expanded.

    `name` is one in ``slurm/sites`` or the path of a ``.sbatch`` file. Without it: ``MPDEMO_SITE``, else the file that
    names the cluster found here, else "generic".
    """
    site = read_site(chosen(name))
    lines = site.text.splitlines()
    for k, line in enumerate(lines):
        directive, mark, comment = line.partition(" # ")
        if not line.startswith(DIRECTIVE) or "$" not in directive:
            continue
        expanded = os.path.expandvars(directive)  # Slurm expands none there; all other lines reach a shell
        if "$" in expanded:
            raise UserError(
                f"site file {site.name}.sbatch: {directive.strip()}: a variable is not set; do: export it"
            )
        lines[k] = expanded + mark + comment
    return dataclasses.replace(site, text="\n".join(lines) + "\n")


def chosen(name: str | Path | None = None) -> str:
    """Return the site that is asked for, or chosen by the environment or the cluster; see `load_site`."""
    return str(name or os.environ.get("MPDEMO_SITE") or find_site())


def site_files() -> dict:
    """Return the site files by their names."""
    return paths.slurm_files("sites/community/*.sbatch", "sites/*.sbatch")


def read_site(name) -> Site:
    """Read a site file as it is written; see `load_site`."""
    file = Path(name) if name.endswith(".sbatch") else site_files().get(name)
    if file is None or not file.exists():
        names, new = ", ".join(sorted(site_files())), Path(name).stem + ".sbatch"
        raise UserError(
            f"no site {name!r}; there are: {names}; a new one is a file {new} in slurm/sites{older(name)}"
        )
    try:
        text = file.read_text(encoding="utf-8")
        facts = "\n".join(line.removeprefix(FACT) for line in text.splitlines() if line.startswith(FACT))
        site = Site(**tomllib.loads(facts) | {"name": file.stem, "text": text})
        refuse_what_is_no_script(site)
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"site file {file.name}: {error}") from None
    return site


def older(name) -> str:
    """Say what to do with a site file of before, if there is one of this name."""
    if not paths.slurm_files(f"sites/{Path(name).stem}.toml"):
        return ""
    return (
        "; a .toml file is of an earlier version: write a batch script with holes, see generic.sbatch there"
    )


def refuse_what_is_no_script(site):
    """Refuse a site file without a directive, without the holes that start a job, or with one that nothing fills."""
    for number, line in enumerate(site.text.splitlines(), 1):
        for name in HOLE.findall(line) if line.startswith(DIRECTIVE) else ():
            if name not in IN_DIRECTIVES:
                allowed = ", ".join(IN_DIRECTIVES) + did_you_mean(name, IN_DIRECTIVES)
                raise UserError(f"line {number}: no hole {{{name}}}; allowed: {allowed}")
    found = set(HOLE.findall("\n".join([*site.lines, *site.srun_options])))
    for name in ("nodes", "tasks", "cpus", "time", "course", "launch"):
        if name not in found:
            raise UserError(f"it has no hole {{{name}}}; do: copy generic.sbatch, and change what differs")


def find_site() -> str:
    """Return the site whose file names the cluster found here, else "generic"; a broken file is named and skipped."""
    cluster = slurm.cluster_name() if slurm.in_reach() else None
    for name in sorted(site_files()) if cluster else ():
        try:
            if cluster in read_site(name).cluster_names:
                return name
        except UserError as error:
            say_once(f"mpdemo: skipped: {error}")
    return "generic"


@functools.cache
def say_once(line):
    """Print a line on stderr, the first time that it is said."""
    print(line, file=sys.stderr)

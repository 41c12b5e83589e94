"""Site files: everything that differs from one cluster to the next, in ``slurm/sites/NAME.toml``.

Those of ``slurm/sites/community`` are found by their names in the same way. The words of a site file are explained in
``generic.toml``. Only their types are checked here; `mpdemo.jobs.check` judges the rest.
"""

import dataclasses
import functools
import math
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mpdemo import paths
from mpdemo.errors import UserError, one_line_errors
from mpdemo.jobs import slurm


def one_line(text) -> str:
    """Refuse what no line of a script can carry; everything else is quoted."""
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError("holds a line break or another control character; write one line per text")
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
TEXTS = ("partition", "qos", "constraint", "memory", "memory_per_cpu", "memory_per_gpu", "max_time")
# What may differ with the size of a job: the type of each word.
OFTEN = dict.fromkeys(TEXTS, str) | {"extra": list, "whole_nodes": bool}
SIZES = ("gpus", "nodes")  # of which a row of `small_jobs` says the largest number
# Slurm expands no variable in a directive, so it is done here. All other lines reach a shell.
DIRECTIVES = ("account", "reservation", "gpu_type", "extra", *TEXTS[:-1])


def by_size(rows) -> tuple:
    """Refuse a row of `small_jobs` that does not say up to which size, or has another word than `OFTEN`."""
    types = OFTEN | dict.fromkeys(SIZES, int)
    for row in rows:
        wrong = [word for word, value in row.items() if type(value) is not types.get(word)]
        if wrong or "$" in str(row) or not set(SIZES) & set(row):
            raise ValueError(f"allowed: rows of gpus or nodes (a whole number) and {', '.join(OFTEN)}; not {row}")
    return tuple(sorted(rows, key=lambda row: [row.get(size, math.inf) for size in SIZES]))


@one_line_errors()
@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Site:
    """A cluster as its site file describes it. Empty text leaves a directive out."""

    name: Line = Field(description="the file's name")
    title: Line = ""
    cluster_names: Lines = ()
    cores_per_node: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    cores_per_job: int = Field(0, ge=0)
    cpus_per_process: int = Field(1, ge=1)
    gpu_syntax: Literal["gres", "gpus-per-node", "gpus-per-task", "gpus", ""] = "gres"
    gpu_type: str = Field("", pattern=r"^[^:=,\s]*$")  # the model alone: the script puts gpu: and the number around it
    partition: Line = ""
    account: Line = ""
    qos: Line = ""
    constraint: Line = ""
    reservation: Line = ""
    memory: Line = ""
    memory_per_cpu: Line = ""
    memory_per_gpu: Line = ""
    hint: Line = ""
    small_jobs: Annotated[tuple[dict, ...], Field(strict=False), AfterValidator(by_size)] = ()
    whole_nodes: bool = False
    srun_only: Annotated[tuple[Literal["ntasks-per-node", "cpus-per-task", "hint"], ...], Field(strict=False)] = ()
    extra: Lines = ()
    max_time: TimeLimit = ""
    login_shell: bool = False
    setup: Lines = ()
    python: Line = "python"
    pytorch: str = Field("", pattern=r"^(\d+\.\d+\S*)?$")
    srun_options: Lines = ()
    binding: Lines = ()
    launcher: Launcher = "srun"
    separate_errors: bool = False
    export_visible_devices: bool = False
    master_suffix: str = Field("", pattern="^[A-Za-z0-9.-]*$")
    scratch: Line = ""
    ranks_on_front_end: bool = True
    polling_seconds: float = Field(5, ge=1, strict=False)


def load_site(name: str | Path | None = None) -> Site:
    """Read a site file, with the variables of its directives (``account = "$COURSE_ACCOUNT"``) expanded.

    `name` is one in ``slurm/sites`` or the path of a ``.toml`` file. Without it: ``MPDEMO_SITE``, else the file that
    names the cluster found here, else "generic".
    """
    site = read_site(str(name or os.environ.get("MPDEMO_SITE") or find_site()))
    values = {}
    for key in DIRECTIVES:
        value = getattr(site, key)
        values[key] = os.path.expandvars(value) if isinstance(value, str) else tuple(map(os.path.expandvars, value))
        if "$" in str(values[key]):
            raise UserError(f"site file {site.name}.toml: {key} {value!r}: a variable is not set; do: export it")
    return dataclasses.replace(site, **values)


def site_files() -> dict:
    """Return the site files by their names."""
    return paths.slurm_files("sites/community/*.toml", "sites/*.toml")


def read_site(name) -> Site:
    """Read a site file as it is written; see `load_site`."""
    file = Path(name) if name.endswith(".toml") else site_files().get(name)
    if file is None or not file.exists():
        names, new = ", ".join(sorted(site_files())), Path(name).stem + ".toml"
        raise UserError(f"no site {name!r}; there are: {names}; a new one is a file {new} in slurm/sites")
    try:
        return Site(**tomllib.loads(file.read_text(encoding="utf-8")) | {"name": file.stem})
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"site file {file.name}: {error}") from None


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

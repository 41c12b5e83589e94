"""Site files: everything that differs from one cluster to the next, in ``slurm/sites/NAME.toml``.

A new cluster is a new file: copy ``generic.toml`` and change what its comments name. No code changes. Only the types
of its values are checked here; what they ask for is judged by Slurm (``sbatch --test-only``, `mpdemo.jobs.check`).
"""

import dataclasses
import functools
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from mpdemo import paths
from mpdemo.errors import UserError, from_validation
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


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Site:
    """A cluster as its site file describes it. Empty text leaves a directive out."""

    name: Line = Field(description="the file's name; not a key of the file")
    title: Line = Field("", description="the cluster in a few words")
    cluster_names: Lines = Field((), description="Slurm's own names for this cluster, by which the file is found")
    cores_per_node: int = Field(1, ge=1, description="what Slurm counts; CPUs per process = cores / GPUs x its GPUs")
    gpus_per_node: int = Field(0, ge=0)
    cpus_per_process: int = Field(1, ge=1, description="of each device where there are no GPUs: a core is a device")
    gpu_syntax: Literal["gres", "gpus-per-node", "gpus-per-task"] = Field("gres", description="how GPUs are requested")
    gpu_type: Line = Field("", description="a model, as in gpu:v100:2")
    partition: Line = ""
    account: Line = ""
    qos: Line = ""
    constraint: Line = ""
    reservation: Line = ""
    memory: Line = Field("", description="--mem; of the three words for memory at most one")
    memory_per_cpu: Line = Field("", description="--mem-per-cpu")
    memory_per_gpu: Line = Field("", description="--mem-per-gpu")
    hint: Line = ""
    extra: Lines = Field((), description="further directives, as --exclusive")
    max_time: TimeLimit = Field("", description="the partition's time limit, [D-]HH:MM:SS")
    features: Lines = Field((), description="constraints that exist, for a throw-away Slurm of this shape")
    login_shell: bool = Field(False, description="#!/bin/bash -l, where only a login shell knows `module`")
    setup: Lines = Field((), description="shell lines that make `python` the right one: modules, an activation")
    python: Line = Field("python", description="how Python starts")
    each_task: Lines = Field((), description="shell lines of each task before Python; not under torchrun")
    srun_options: Lines = Field((), description="more options of srun, as --mpi=none")
    binding: Lines = Field((), description="options of srun that bind a task to its cores; not under torchrun")
    launcher: Launcher = Field("srun", description="one Slurm task per process, or one torchrun per node")
    separate_errors: bool = Field(False, description="a second file for stderr")
    export_visible_devices: bool = Field(False, description="set CUDA_VISIBLE_DEVICES explicitly")
    master_suffix: str = Field("", pattern="^[A-Za-z0-9.-]*$", description="appended to the first node's name")
    scratch: Line = Field("", description="where large files belong; `python -m mpdemo env` checks it")
    ranks_on_front_end: bool = Field(True, description="whether a notebook may start ranks outside a Slurm job")
    inside_a_job: Literal["queue", "steps"] = Field("queue", description="how a notebook in a job starts others")
    quota: Line = Field("", description="the command that prints the user's quota; `python -m mpdemo env` runs it")
    polling_seconds: float = Field(5, ge=1, description="how often Slurm is asked about a job, at most", strict=False)


# Slurm expands no variable in a directive, so it is done here. All other lines reach a shell.
DIRECTIVES = ("partition", "account", "qos", "constraint", "reservation", "memory", "memory_per_cpu", "memory_per_gpu",
              "gpu_type", "extra")  # fmt: skip
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def load_site(name=None) -> Site:
    """Read a site file, with the variables of its directives (``account = "$COURSE_ACCOUNT"``) expanded.

    Parameters
    ----------
    name : str, optional
        A name in ``slurm/sites`` or the path of a ``.toml`` file. Without it: ``MPDEMO_SITE``, else the file that
        names the cluster in reach, else "generic".

    Raises
    ------
    UserError
        No such site (with the list of those there are), a file with an unknown key or a value that is not allowed, or
        a variable that is not set.
    """
    site = read_site(name or os.environ.get("MPDEMO_SITE") or find_site())
    values = {key: expand(getattr(site, key), f"site file {site.name}.toml: {key}") for key in DIRECTIVES}
    return dataclasses.replace(site, **values)


def expand(value, where):
    """Replace ``$NAME`` and ``${NAME}`` in a text, or in each of several; `where` begins the message."""
    if not isinstance(value, str):
        return tuple(expand(text, where) for text in value)
    for variable in (first or second for first, second in VARIABLE.findall(value)):
        if variable not in os.environ:
            raise UserError(f"{where} {value!r}: {variable} is not set; do: export {variable}=..., or write the value")
    return VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], value)


def site_names() -> list[str]:
    """Return the names of the site files."""
    return sorted(paths.slurm_files("sites/*.toml"))


def read_site(name) -> Site:
    """Read a site file as it is written; see `load_site`."""
    file = Path(name) if name.endswith(".toml") else paths.slurm_files("sites/*.toml").get(name)
    if file is None or not file.exists():
        names, new = ", ".join(site_names()), Path(name).stem + ".toml"
        raise UserError(f"no site {name!r}; there are: {names}; a new one is a file {new} in slurm/sites")
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"site file {file.name} is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the site file {file.name}: {error}") from None
    if "name" in values:
        raise UserError(f"site file {file.name}: 'name' is not allowed; a site is named by its file; remove it")
    try:
        return Site(file.stem, **values)
    except ValidationError as error:
        keys = [key for key in Site.__dataclass_fields__ if key != "name"]
        raise UserError(f"site file {file.name}: {from_validation(error, keys)}") from None


def all_sites() -> list[Site]:
    """Return every site that can be read; a broken file is named on stderr, and stops nobody who did not ask for it."""
    sites = []
    for name in paths.slurm_files("sites/*.toml"):
        try:
            sites.append(read_site(name))
        except UserError as error:
            say_once(f"skipped: {error}")
    return sites


@functools.cache
def say_once(message):
    """Print a line on stderr, the first time it is said."""
    print(message, file=sys.stderr)


def find_site() -> str:
    """Return the site whose file names the cluster in reach, else "generic"."""
    cluster = slurm.cluster_name() if slurm.in_reach() else None
    names = [site.name for site in all_sites() if cluster in site.cluster_names] if cluster else []
    return names[0] if names else "generic"


def feature_names(constraint) -> list[str]:
    """Return the features in a constraint: ``"[rack1|rack2]&gpu*4"`` holds rack1, rack2 and gpu."""
    words = re.split(r"[&|,()\[\]]+", re.sub(r"\*\d+", "", constraint))
    return [word.strip() for word in words if word.strip()]


def wanted_by_sites() -> dict:
    """Collect what the site files ask of a cluster, so that a throw-away one can offer it."""
    sites = all_sites()
    constraints = [text for site in sites for text in (site.constraint, *site.features)]
    wanted = {
        "partitions": {name for site in sites for name in site.partition.split(",")},
        "features": {name for constraint in constraints for name in feature_names(constraint)},
        "reservations": {site.reservation for site in sites},
    }
    return {kind: sorted(name for name in names if name and "$" not in name) for kind, names in wanted.items()}

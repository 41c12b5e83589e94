"""Site files: everything that differs from one cluster to the next, in ``slurm/sites/NAME.toml``.

A new cluster is a new file: copy ``generic.toml`` and change what its comments name. No code changes.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from mpdemo import paths
from mpdemo.errors import UserError, from_validation
from mpdemo.jobs import slurm, times


def one_line(text) -> str:
    """Refuse what no line of a script can carry; everything else is quoted."""
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError("holds a line break or another control character; write one line per text")
    return text


def time_limit(text) -> str:
    """Refuse a time limit that Slurm could not read; an empty text is none."""
    if text:
        times.limit(text)
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
    gpu_syntax: Literal["gres", "gpus-per-node", "gpus-per-task"] = Field("gres", description="how GPUs are requested")
    gpu_type: Line = Field("", description="a model, as in gpu:v100:2")
    partition: Line = ""
    account: Line = ""
    qos: Line = ""
    constraint: Line = ""
    reservation: Line = ""
    memory: Line = Field("", description="--mem")
    hint: Line = ""
    max_time: TimeLimit = Field("", description="the partition's time limit, [D-]HH:MM:SS")
    features: Lines = Field((), description="constraints that exist; a misspelt one is found before submission")
    setup: Lines = Field((), description="shell lines that make `python` the right one: modules, an activation")
    launcher: Launcher = Field("srun", description="one Slurm task per process, or one torchrun per node")
    separate_errors: bool = Field(False, description="a second file for stderr")
    export_visible_devices: bool = Field(False, description="set CUDA_VISIBLE_DEVICES explicitly")
    master_suffix: str = Field("", pattern="^[A-Za-z0-9.-]*$", description="appended to the first node's name")
    scratch: Line = Field("", description="where large files belong; `python -m mpdemo env` checks it")

    @property
    def cpus_per_gpu(self) -> int:
        """A GPU's fair share of the node's cores (all of them where there are no GPUs)."""
        return max(1, self.cores_per_node // max(1, self.gpus_per_node))


def site_names() -> list[str]:
    """The names of the site files of this project."""
    return sorted(file.stem for file in (paths.root() / "slurm/sites").glob("*.toml"))


def load_site(name=None) -> Site:
    """Read a site file.

    Parameters
    ----------
    name : str, optional
        A name in ``slurm/sites`` or the path of a ``.toml`` file. Without it: ``MPDEMO_SITE``, else the file that
        names the cluster in reach, else "generic".

    Raises
    ------
    UserError
        No such site (with the list of those there are), or a file with an unknown key or a value that is not allowed.
    """
    name = name or os.environ.get("MPDEMO_SITE") or find_site()
    file = Path(name) if name.endswith(".toml") else paths.root() / f"slurm/sites/{name}.toml"
    if not file.exists():
        names = ", ".join(site_names())
        raise UserError(f"no site {name!r}; there are: {names}; a new one is a file {file.name} in slurm/sites")
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


def find_site() -> str:
    """Return the site whose file names the cluster in reach, else "generic"."""
    cluster = slurm.cluster_name() if slurm.in_reach() else None
    for name in site_names() if cluster else []:
        if cluster in load_site(name).cluster_names:
            return name
    return "generic"


def wanted_by_sites() -> dict:
    """Collect what the site files ask of a cluster, so that a throw-away one can offer it."""
    sites = [load_site(name) for name in site_names()]
    features = {feature for site in sites for feature in (site.constraint, *site.features) if feature}
    return {
        "partitions": sorted({site.partition for site in sites if site.partition}),
        "features": sorted(features),
        "reservations": sorted({site.reservation for site in sites if site.reservation}),
    }

"""Site files: everything that differs from one cluster to the next, in ``slurm/sites/NAME.toml``.

A new cluster is a new file: copy ``generic.toml`` and change what its comments name. No code changes.
"""

import dataclasses
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError

GPU_SYNTAXES = ("gres", "gpus-per-node", "gpus-per-task")
LAUNCHERS = ("srun", "torchrun")


@dataclass(frozen=True)
class Site:
    """A cluster as a site file describes it. Empty text means that the directive is left out.

    Attributes
    ----------
    cores_per_node, gpus_per_node : int
        What Slurm counts on a node. CPUs per process = cores / GPUs x GPUs per process. No GPUs: 0.
    gpu_syntax : {"gres", "gpus-per-node", "gpus-per-task"}
        How GPUs are asked for; `gpu_type` names a model, as in ``gpu:v100:2``.
    partition, account, qos, constraint, reservation, memory, hint : str
        The values of the directives of these names (memory: ``--mem``).
    max_time : str
        The partition's time limit, ``[D-]HH:MM:SS``.
    features : tuple of str
        Constraints that exist here; with it, a misspelt one is found before submission.
    setup : tuple of str
        Shell lines that make ``python`` the right one: modules, an activation.
    launcher : {"srun", "torchrun"}
        One Slurm task a process, or one torchrun a node.
    separate_errors, export_visible_devices, master_suffix : bool, bool, str
        A second file for stderr; an explicit ``CUDA_VISIBLE_DEVICES``; what to append to the first node's name.
    scratch : str
        Where large files belong; told by ``python -m mpdemo env``.
    cluster_names : tuple of str
        Slurm's own names for this cluster, by which the file is found.
    """

    name: str
    title: str = ""
    cluster_names: tuple = ()
    cores_per_node: int = 1
    gpus_per_node: int = 0
    gpu_syntax: str = "gres"
    gpu_type: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    memory: str = ""
    hint: str = ""
    max_time: str = ""
    features: tuple = ()
    setup: tuple = ()
    launcher: str = "srun"
    separate_errors: bool = False
    export_visible_devices: bool = False
    master_suffix: str = ""
    scratch: str = ""

    @property
    def cpus_per_gpu(self) -> int:
        """A GPU's fair share of the node's cores (all of them where there are no GPUs)."""
        return max(1, self.cores_per_node // max(1, self.gpus_per_node))


def sites_folder() -> Path:
    return paths.root() / "slurm" / "sites"


def site_names() -> list[str]:
    """The names of the site files of this project."""
    return sorted(file.stem for file in sites_folder().glob("*.toml"))


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
        No such site (with the list of those there are), or a file with an unknown or mistyped key.
    """
    name = name or os.environ.get("MPDEMO_SITE") or find_site()
    file = Path(name) if name.endswith(".toml") else sites_folder() / f"{name}.toml"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = ", ".join(site_names())
        raise UserError(
            f"no site {name!r}; there are: {names}; a new one is a file {file.name} in slurm/sites"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the site file {file.name}: {error}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"site file {file.name} is not TOML: {error}") from None
    return make_site(file.stem, values, file.name)


def find_site() -> str:
    """Return the site whose file names the cluster in reach, else "generic"."""
    from mpdemo.jobs import slurm

    cluster = slurm.cluster_name() if slurm.in_reach() else None
    for name in site_names() if cluster else []:
        if cluster in load_site(name).cluster_names:
            return name
    return "generic"


def make_site(name, values, file) -> Site:
    """Check every key and value of a site file and build the `Site`."""
    fields = {field.name: field for field in dataclasses.fields(Site) if field.name != "name"}
    for key, value in values.items():
        if key not in fields:
            raise UserError(f"site file {file}: unknown key {key!r}; allowed: {', '.join(fields)}")
        check_value(file, key, value, fields[key].type)
    if values.get("gpu_syntax", "gres") not in GPU_SYNTAXES:
        raise UserError(f"site file {file}: gpu_syntax = {values['gpu_syntax']!r}; allowed: {', '.join(GPU_SYNTAXES)}")
    if values.get("launcher", "srun") not in LAUNCHERS:
        raise UserError(f"site file {file}: launcher = {values['launcher']!r}; allowed: {', '.join(LAUNCHERS)}")
    if not re.fullmatch(r"[A-Za-z0-9.-]*", values.get("master_suffix", "")):
        raise UserError(
            f"site file {file}: master_suffix = {values['master_suffix']!r}; allowed: letters, digits, . and -"
        )
    if values.get("max_time"):
        seconds(values["max_time"], f"site file {file}: max_time")
    return Site(name=name, **{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def check_value(file, key, value, kind):
    """Raise `UserError` unless a value has its field's type."""
    words = {
        str: "text in quotes",
        int: "a whole number of at least 0",
        bool: "true or false",
        tuple: "a list of texts",
    }
    if kind is tuple:
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    elif kind is int:
        good = type(value) is int and value >= (1 if key == "cores_per_node" else 0)
    else:
        good = type(value) is kind
    if not good:
        raise UserError(f"site file {file}: {key} = {value!r}; it takes {words[kind]}")
    texts = value if kind is tuple else [value] if kind is str else []
    if any(ord(c) < 32 for text in texts for c in text):
        raise UserError(
            f"site file {file}: {key} holds a line break or another control character; write one line a text"
        )


def seconds(text, what="time limit") -> int:
    """Read a time limit the way Slurm does: ``MM``, ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM``, ``D-HH:MM:SS``.

    Examples
    --------
    >>> seconds("00:10:00"), seconds("90"), seconds("1-12")
    (600, 5400, 129600)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(text), re.ASCII)
    if not match:
        raise UserError(f"{what}: {text!r} is no time; allowed: HH:MM:SS or D-HH:MM:SS, as in 00:10:00")
    days, *parts = match.groups()
    given = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, secs = (*given, 0, 0)[:3]
    elif len(given) == 3:
        hours, minutes, secs = given
    else:
        hours, (minutes, secs) = 0, (*given, 0)[:2]
    total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs
    if total == 0:
        raise UserError(f"{what}: {text!r} is no time at all; give at least one second, as in 00:10:00")
    return total


def wanted_by_sites() -> dict:
    """Collect what the site files ask of a cluster, so that a throw-away one can offer it."""
    sites = [load_site(name) for name in site_names()]
    features = {feature for site in sites for feature in (site.constraint, *site.features) if feature}
    return {
        "partitions": sorted({site.partition for site in sites if site.partition}),
        "features": sorted(features),
        "reservations": sorted({site.reservation for site in sites if site.reservation}),
    }

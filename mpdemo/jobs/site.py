"""Site files: everything that differs from one cluster to the next, in ``slurm/sites/NAME.toml``.

A new cluster is a new file: copy ``generic.toml`` and change what its comments name. No code changes. The words of a
file are declared in `mpdemo.jobs.site_words`.
"""

import dataclasses
import functools
import os
import re
import sys
import tomllib
from pathlib import Path

from pydantic import ValidationError

from mpdemo import paths
from mpdemo.errors import UserError, from_validation
from mpdemo.jobs import slurm
from mpdemo.jobs.site_words import Launcher, Line, Site, TimeLimit

__all__ = ["Launcher", "Line", "Site", "TimeLimit", "feature_names", "find_site", "load_site", "read_site",
           "site_names", "wanted_by_sites"]  # fmt: skip
# Directives: Slurm expands no variable in them, so they are expanded here. All other lines reach a shell.
DIRECTIVES = ("partition", "account", "qos", "constraint", "reservation", "memory", "memory_per_cpu", "memory_per_gpu",
              "gpu_type", "extra")  # fmt: skip
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def site_files() -> dict:
    """Return every site file by its name."""
    return paths.slurm_files("sites/*.toml")


def site_names() -> list[str]:
    """The names of the site files."""
    return sorted(site_files())


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


def read_site(name) -> Site:
    """Read a site file as it is written; see `load_site`."""
    file = Path(name) if name.endswith(".toml") else site_files().get(name)
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
    """Every site file that can be read; one that cannot is named on stderr, and stops nobody who did not ask for it."""
    sites = []
    for name in site_files():
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
    """The features in a constraint: ``"[rack1|rack2]&gpu*4"`` holds rack1, rack2 and gpu."""
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

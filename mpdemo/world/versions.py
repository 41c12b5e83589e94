"""Refuse a PyTorch that is too old for this package. The oldest versions stand once, in pyproject.toml."""

import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from mpdemo.errors import UserError
from mpdemo.paths import source


def requirements() -> dict:
    """Return the allowed versions of each package that this one needs, by its name."""
    project = source() / "pyproject.toml"
    if project.exists():
        lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    else:  # installed without its source tree
        lines = [line for line in metadata.requires("mpdemo") or [] if ";" not in line]
    return {one.name: one.specifier for one in map(Requirement, lines)}


def check_version(package, version):
    """Refuse a version that pyproject.toml does not allow."""
    allowed = requirements()[package]
    if Version(version).base_version not in allowed:  # without the local part of 2.11.0+cu126
        raise UserError(
            f"{package} {version} is too old; allowed: {allowed}; "
            f"load a newer module (setup in the site file), or pip install --upgrade {package}"
        )

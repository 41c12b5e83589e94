"""An app of Open OnDemand, the portal of many centres: JupyterLab with the course, on the facts of a site file.

The files are in slurm/ood, with holes as in a site file. What an app has, and what the portal fills in (``<%= %>``):
https://osc.github.io/ood-documentation/latest/how-tos/app-development/interactive.html.
"""

from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.sbatch_text import OF_GPUS, fill
from mpdemo.jobs.site import DIRECTIVE, holes

FOLDER = "slurm/ood"
OF_THE_PORTAL = (
    "--account",
    "--output",
    "--error",
    "--no-requeue",
)  # it sets them itself, as name and time
ASKED = {"nodes": 1, "tasks": 1, "job_tasks": 1, "cpus": "<%= cores %>"}
ASKED |= dict.fromkeys(("gpus", "task_gpus", "job_gpus"), "<%= gpus %>")
HOURS = 24  # at most, where a site states no limit


def write(site, folder) -> list[Path]:
    """Write the app for a `site` into a folder; return the files. Raise `UserError` where the folder isn't writable."""
    source, folder = paths.root() / FOLDER, Path(folder)
    if not source.is_dir():
        raise UserError(f"{source} is missing; do: run this in a clone of the course")
    given, written = values(site), []
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(fill(file.read_text(encoding="utf-8"), given), encoding="utf-8")
        written.append(target)
    return written


def values(site) -> dict:
    """Return what fills the holes."""
    hours = int(slurm.limit(site.max_time) // 3600) if site.max_time else HOURS
    return {
        "site": site.name,
        "cluster": next(iter(site.cluster_names), site.name),
        "hours": max(1, hours),
        "two_cores": min(2, site.cores_per_node),
        "cores_per_node": site.cores_per_node,
        "gpus_per_node": site.gpus_per_node,
        "directives": "\n".join(directives(site)),
        "setup": "\n".join(site.setup),
        "root": paths.root(),
        "python": site.python,
    }


def directives(site) -> list[str]:
    """Return the site's directives as items of a list in YAML, those for GPUs where the form asks for some."""
    items = []
    for line in site.lines:
        if not line.startswith(DIRECTIVE) or {"name", "time", "signal"} & {*holes(line)}:
            continue
        option = line.removeprefix(DIRECTIVE).partition(" # ")[0].strip()
        if option.startswith(OF_THE_PORTAL):
            continue
        item = f'    - "{fill(option, ASKED)}"'
        items += (
            ["    <%- if gpus.to_i > 0 -%>", item, "    <%- end -%>"] if OF_GPUS.match(line) else [item]
        )
    return items

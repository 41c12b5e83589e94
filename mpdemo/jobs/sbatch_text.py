"""The batch script of a job: its site's script with the holes filled, which a learner can read and keep.

Our own code: the libraries that submit to Slurm hide this text, which is what the course teaches. What starts the
processes is made in `mpdemo.jobs.launch_text`.
"""

import dataclasses
import re
import shlex

from mpdemo.jobs.launch_text import FIRST_NODE, by_itself, course, environment, launch, setup_line
from mpdemo.jobs.site import DIRECTIVE, HOLE, Site, holes
from mpdemo.jobs.spec import JobSpec

WIDTH = 48  # column of the directives' comments
OF_GPUS = re.compile(rf"{DIRECTIVE} --(gres=gpu|[a-z-]*gpu)")


def render(spec: JobSpec, site: Site) -> str:
    """Return the batch script of a job, `spec`, on a `site` (see `load_site`), for any folder of the project."""
    spec = fitted(spec, site)
    given = values(spec, site)
    given["launch"] = launch(spec, site, [fill(option, given) for option in site.srun_options])
    lines = [site.shell]
    for line in site.lines:
        if any(given[name] == "" for name in holes(line)) or (OF_GPUS.match(line) and not given["gpus"]):
            continue
        if line.startswith(DIRECTIVE):
            lines.append(directive(line, given))
        elif holes(line):
            lines.append(fill(line, given))
        else:
            lines.append(setup_line(line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def fitted(spec: JobSpec, site: Site) -> JobSpec:
    """Return a job as it fits its site: with the site's launcher, and a node per process where nodes have one GPU."""
    spread = site.gpus_per_node == spec.gpus_per_process == 1
    shape = {"nodes": spec.world_size, "processes_per_node": 1} if spread else {}
    return dataclasses.replace(spec, launcher=spec.launcher or site.launcher, **shape)


def values(spec, site) -> dict:
    """Return what fills each hole; a line with an empty one is left out."""
    has_gpus = site.gpus_per_node > 0 and spec.gpus_per_node > 0
    gpus = gpus_on_node(spec, site) if has_gpus else ""
    return {
        "name": quote(spec.name),
        "nodes": spec.nodes,
        "tasks": spec.tasks_per_node,
        "gpus": gpus,
        "job_tasks": spec.nodes * spec.tasks_per_node,
        "task_gpus": spec.gpus_per_node // spec.tasks_per_node if has_gpus else "",
        "job_gpus": gpus and spec.nodes * gpus,
        "cpus": cpus_per_task(spec, site),
        "time": spec.time_limit,
        "signal": spec.signal or "",
        "course": course(spec, site),
        "first_node": "" if by_itself(spec) else FIRST_NODE,
        "environment": environment(spec, site),
        "devices": ",".join(map(str, range(spec.gpus_per_node))) if has_gpus else "",
    }


def fill(text, given) -> str:
    """Return a text with its holes filled; other braces are the shell's."""
    return HOLE.sub(lambda hole: str(given.get(hole[1], hole[0])), text)


def directive(line, given) -> str:
    """Return a directive with its holes filled, and its comment in the column of all comments."""
    asked, _, comment = line.partition(" # ")
    asked = fill(asked.rstrip(), given)
    return f"{asked:<{WIDTH}} # {comment.strip()}" if comment else asked


def quote(value) -> str:
    """Return a value as sbatch reads it in a directive: double quotes, where it holds more than a word."""
    text = str(value)
    if text == shlex.quote(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def cpus_per_task(spec, site) -> int:
    """Return the CPUs of a task: those asked for, or its GPUs' part of the node's cores; a core without GPUs."""
    each = max(1, site.cores_per_node // site.gpus_per_node) if site.gpus_per_node else 1
    each *= max(1, spec.gpus_per_process)
    if site.cores_per_job:
        each = min(each, max(1, site.cores_per_job // spec.world_size))
    return (spec.cpus_per_process or each) * (spec.processes_per_node // spec.tasks_per_node)


def gpus_on_node(spec, site) -> int:
    """Return how many GPUs the job gets on each node."""
    return site.gpus_per_node if site.gives("exclusive") else spec.gpus_per_node

"""A job fitted to its site, and its batch script: text that a learner can read and keep.

Our own code: the libraries that submit to Slurm hide this text, which is what the course teaches. The directives are
made here, the commands below them in `mpdemo.jobs.launch_text`.
"""

import dataclasses
import re
import shlex
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.jobs.launch_text import commands, option_name
from mpdemo.jobs.site import SIZES, Site
from mpdemo.jobs.spec import JobSpec

WIDTH = 48  # column of the directives' comments
# Other words for what a script asks for.
CLASHES = {"gpus", "gpus-per-node", "gpus-per-task", "ntasks", "requeue", "no-requeue"}


class FittedJob(NamedTuple):
    """A job as it fits its site: what its batch script, its check and its submission read. Made by `fitted`."""

    spec: JobSpec  # with the site's launcher, and a node per process where nodes have one GPU
    site: Site  # with its words for jobs of this size
    asked: JobSpec  # the spec as it was written: the record of a job keeps it, and this machine runs it

    @property
    def text(self) -> str:
        """The batch script; `UserError` for a directive of the site that the script writes itself."""
        shell = "#!/bin/bash -l" if self.site.login_shell else "#!/bin/bash"
        launched = commands(self.spec, self.site, of_srun(self.spec, self.site))
        return "\n".join([shell, *directives(self.spec, self.site), "", *launched]) + "\n"


def fitted(asked: JobSpec, site: Site) -> FittedJob:
    """Fit a job to its site; `UserError` for a job that cannot restart as it should."""
    spread = site.gpus_per_node == asked.gpus_per_process == 1
    shape = {"nodes": asked.world_size, "processes_per_node": 1} if spread else {}
    spec = dataclasses.replace(asked, launcher=asked.launcher or site.launcher, **shape)
    refuse_what_cannot_restart(spec)
    size = {"gpus": spec.devices if site.gpus_per_node else 0, "nodes": spec.nodes}
    fitting = (row for row in site.small_jobs if all(size[name] <= row.get(name, size[name]) for name in SIZES))
    words = {word: value for word, value in next(fitting, {}).items() if word not in SIZES}
    return FittedJob(spec, dataclasses.replace(site, **words), asked)


def render(spec: JobSpec, site: Site) -> str:
    """Return the batch script of a job, `spec`, on a `site` (see `load_site`); it runs from any folder of the project.

    `UserError` for a job that cannot restart as it should, or a directive of the site that the script writes itself.
    """
    return fitted(spec, site).text


def refuse_what_cannot_restart(spec):
    """Refuse a job that Slurm may start again, where that would lose its work or never happen."""
    if not spec.requeue:
        return
    resumes = any(word.startswith("--resume") for word in spec.command)
    if spec.command[:3] == ("-m", "mpdemo", "train") and not resumes:
        raise UserError("requeue=True with a training run that starts anew; do: add --resume auto")
    if spec.launcher == "torchrun":  # so the script cannot tell
        raise UserError('requeue=True: torchrun hides that a run stopped with a checkpoint; do: launcher="srun"')


def directives(spec, site) -> list[str]:
    """Return the ``#SBATCH`` lines: what Slurm is asked for, each with its reason."""
    gpus, extra = with_gres(gpu_rows(spec, site), site.extra)
    of_sbatch = [row for row in requests(spec, site, gpus) if row[0] not in site.srun_only]
    rows = [(f"{option}={quote(value)}", comment) for option, value, comment in of_sbatch]
    if site.whole_nodes:
        rows.append(("exclusive", "whole nodes, with all that is in them"))
    if spec.requeue:
        rows.append(("requeue", "it may start again from its checkpoint"))
        rows.append(("open-mode=append", "and then continues in the same log"))
    else:
        rows.append(("no-requeue", "a job that lost its node is not started again"))
    refuse_twice(site, extra, {option_name(option) for option, _ in rows} | CLASHES)
    rows += [(quote(option.removeprefix("--")), "of this site") for option in extra]
    lines = [f"{'#SBATCH --' + option:<{WIDTH}} # {comment}" for option, comment in rows]
    return lines if site.account else [*lines, "# Most sites also want your project, above: #SBATCH --account=..."]


def requests(spec, site, gpus) -> list[tuple]:
    """Return option, value and comment of what the job asks Slurm for, with the rows that ask for GPUs."""
    task = "one task per process"
    if spec.launcher == "torchrun":
        task = f"one torchrun per node, which starts {spec.processes_per_node}"
    elif site.gpus_per_node and spec.gpus_per_process == 1:
        task += ", one process per GPU"
    rows = [
        ("job-name", spec.name, "what the queue shows"),
        ("nodes", spec.nodes, f"{spec.world_size} process{'es' if spec.world_size > 1 else ''} in all"),
        ("ntasks-per-node", spec.tasks_per_node, task),
        *gpus,
        ("cpus-per-task", *cpus_per_task(spec, site)),
        ("time", spec.time_limit, "the job is ended after this"),
        ("hint", site.hint, "one CPU per physical core" if site.hint == "nomultithread" else "how cores are counted"),
        ("mem", site.memory, "all of the node's memory" if site.memory == "0" else "memory of each node"),
        ("mem-per-cpu", site.memory_per_cpu, "memory of each CPU"),
        ("mem-per-gpu", site.memory_per_gpu if gpus else "", "memory of each GPU's share"),
        ("partition", site.partition, "which part of the cluster"),
        ("account", site.account, "whose hours are spent"),
        ("qos", site.qos, "the queue's class: limits and priority"),
        ("constraint", site.constraint, "the kind of node"),
        ("reservation", site.reservation, "nodes set aside for a course"),
        ("output", "slurm-%j.out", "the log, in the folder where sbatch is called"),
        ("error", "slurm-%j.err" if site.separate_errors else "", "what goes to stderr"),
        ("signal", spec.signal or "", "a warning to every process before the end"),
    ]
    return [row for row in rows if row[1] != ""]


def of_srun(spec, site) -> list[str]:
    """Return the options that the site takes from srun only, not from a directive."""
    options = [f"--{option}={value}" for option, value, _ in requests(spec, site, []) if option in site.srun_only]
    tasks = [f"--ntasks={spec.nodes * spec.tasks_per_node}"] if "ntasks-per-node" in site.srun_only else []
    return tasks + options


def refuse_twice(site, extra, written):
    """Refuse further directives of the site that are written already: one of the two would be lost."""
    for text in extra:
        well_formed, for_gpus = re.fullmatch(r"--[a-z][a-z-]*(=.*)?", text), "--gres" in text and "gpu" in text
        if not well_formed or for_gpus or option_name(text) in written:
            why = "asks for what the script writes itself, or is no --name=value; take it out, there are words for that"
            raise UserError(f"site file {site.name}.toml: extra {text!r} {why}")


def quote(value) -> str:
    """Return a value as sbatch reads it in a directive: double quotes, where it holds more than a word."""
    text = str(value)
    if text == shlex.quote(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def cpus_per_task(spec, site) -> tuple[int, str]:
    """Return the CPUs of a task, and the arithmetic behind them."""
    each, gpus = max(1, spec.gpus_per_process), site.gpus_per_node
    in_all = max(1, site.cores_per_job // spec.world_size)
    cpus, text = site.cpus_per_process * each, f"{site.cpus_per_process} for each device, which is a core here"
    if gpus:
        cpus = max(1, site.cores_per_node // gpus) * each
        text = f"{site.cores_per_node} CPUs of a node / {gpus} GPUs"
        if each > 1:
            text += f" x {each} GPUs"
    if site.cores_per_job and in_all < cpus:
        cpus, text = in_all, f"{site.cores_per_job} CPUs of a job / {spec.world_size} processes"
    if spec.cpus_per_process is not None:
        cpus, text = spec.cpus_per_process, f"{spec.cpus_per_process} asked for"
    several = spec.processes_per_node // spec.tasks_per_node
    return cpus * several, f"{text} x {several} processes" if several > 1 else text


def with_gres(rows, extra) -> tuple:
    """Join what the site's further directives ask by ``--gres`` with the GPUs: Slurm takes the last ``--gres`` only."""
    local = [text for text in extra if option_name(text) == "gres" and "gpu" not in text]
    if not (local and rows and rows[0][0] == "gres"):
        return rows, extra
    option, gpus, comment = rows[0]
    joined = ",".join([gpus, *(text.partition("=")[2] for text in local)])
    return [(option, joined, comment)], [text for text in extra if text not in local]


def gpu_rows(spec, site) -> list[tuple]:
    """Return the row that asks for GPUs, in the site's syntax; none where they come with the nodes."""
    if not (site.gpu_syntax and site.gpus_per_node and spec.gpus_per_node):
        return []
    of_task = spec.gpus_per_process if spec.launcher == "srun" else spec.gpus_per_node
    number, comment = gpus_on_node(spec, site), "all GPUs of each node"
    if not site.whole_nodes:
        comment = f"on each node: {spec.processes_per_node} x {spec.gpus_per_process} (processes x GPUs of each)"
    others = {"gpus": (spec.nodes * number, "GPUs of the whole job"), "gpus-per-task": (of_task, "GPUs of each task")}
    number, comment = others.get(site.gpu_syntax, (number, comment))
    words = ["gpu" if site.gpu_syntax == "gres" else "", site.gpu_type, str(number)]
    return [(site.gpu_syntax, ":".join(filter(None, words)), comment)]


def gpus_on_node(spec, site) -> int:
    """Return how many GPUs the job gets on each node."""
    return site.gpus_per_node if site.whole_nodes else spec.gpus_per_node

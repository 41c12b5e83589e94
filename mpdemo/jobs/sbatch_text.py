"""The sbatch file of a job: one pure function from a spec and a site to text that a learner can read and keep.

Kept by hand: the libraries that submit to Slurm hide this text, which is what the course teaches. The directives are
made here, the commands below them in `mpdemo.jobs.launch_text`.
"""

import shlex

from mpdemo.errors import UserError
from mpdemo.jobs.launch_text import commands
from mpdemo.jobs.site import Site
from mpdemo.jobs.spec import JobSpec

WIDTH = 48  # column of the directives' comments


def render(spec: JobSpec, site: Site) -> str:
    """Return the sbatch file of a job on a site.

    Pure and deterministic: the same spec and site give the same text. It runs as it is, submitted from the project's
    root or any folder below it (``sbatch slurm/NAME.sbatch``); all paths are relative to the root.

    Parameters
    ----------
    spec : JobSpec
    site : Site
        See `mpdemo.jobs.load_site`.

    Returns
    -------
    str
        The file, with its last line ended. Notebook 00 reads it line by line.

    Raises
    ------
    UserError
        ``requeue`` with torchrun, which hides the processes' exit status; ``least_nodes`` without torchrun; one of the
        two with a training run that would start anew.
    """
    spec = spec.on(site)
    refuse_what_cannot_restart(spec)
    shell = "#!/bin/bash -l" if site.login_shell else "#!/bin/bash"
    return "\n".join([shell, *directives(spec, site), "", *commands(spec, site)]) + "\n"


def refuse_what_cannot_restart(spec):
    """Refuse a job that Slurm or torchrun may start again, where that would lose its work or never happen."""
    fewer = f"least_nodes={spec.least_nodes}"
    again = "requeue=True" if spec.requeue else fewer if spec.least_nodes else None
    if again and "train" in spec.command and "--resume" not in spec.command:
        raise UserError(f'{again} with a training that starts anew; do: train_command(..., resume="auto")')
    if spec.least_nodes and spec.launcher != "torchrun":
        raise UserError(f'{fewer} without torchrun, which starts the processes anew; do: launcher="torchrun"')
    if spec.requeue and spec.launcher == "torchrun":
        raise UserError(
            "requeue=True with torchrun: it ends with status 1 also where its processes stopped with a checkpoint (3), "
            'so the script cannot tell; do: launcher="srun"'
        )


def directives(spec, site) -> list[str]:
    """Return the ``#SBATCH`` lines: what Slurm is asked for, each with its reason."""
    gpus = gpu_rows(spec, site)
    rows = [
        ("job-name", spec.name, "what the queue shows"),
        ("nodes", spec.nodes, f"{spec.world_size} process{'es' if spec.world_size > 1 else ''} in all"),
        ("ntasks-per-node", spec.tasks_per_node, tasks_comment(spec, site)),
        *gpus,
        ("cpus-per-task", spec.cpus_per_task(site), cpus_comment(spec, site)),
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
    rows = [(f"{option}={quote(value)}", comment) for option, value, comment in rows if value != ""]
    rows += [(quote(option.removeprefix("--")), "of this site") for option in site.extra]
    if spec.dependency:
        rows += [(f"dependency={spec.dependency}", "it waits for other jobs")]
        rows += [("kill-on-invalid-dep=yes", "and is taken away where they end otherwise")]
    if spec.requeue:
        rows += [("requeue", "it may start again from its checkpoint")]
        rows += [("open-mode=append", "and then goes on in the same log")]
    else:
        rows += [("no-requeue", "a job that lost its node is not started again")]
    if spec.least_nodes:
        rows += [("no-kill", "when a node fails, the job goes on")]
    return [f"{'#SBATCH --' + option:<{WIDTH}} # {comment}" for option, comment in rows]


def log_options(spec, site) -> list[str]:
    """Return the options of sbatch that put the log into the run's folder; they count more than the file's own."""
    ends = {"output": "out"} | ({"error": "err"} if site.separate_errors else {})
    folder = spec.out.replace("%", "%%")  # "%" begins a pattern there
    return [f"--{option}={folder}/slurm-%j.{end}" for option, end in ends.items()]


def quote(value) -> str:
    """Return a value as sbatch reads it in a directive: double quotes, where it holds more than a word."""
    text = str(value)
    if text == shlex.quote(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def tasks_comment(spec, site) -> str:
    """Say what a task is."""
    if spec.launcher == "torchrun":
        return f"one torchrun per node, which starts {spec.processes_per_node}"
    if site.gpus_per_node and spec.gpus_per_process == 1:
        return "one task per process, one process per GPU"
    return "one task per process"


def cpus_comment(spec, site) -> str:
    """Show the arithmetic behind the CPUs of a task."""
    if spec.cpus_per_process is not None:
        text = f"{spec.cpus_per_process} asked for"
    elif site.gpus_per_node:
        text = f"{site.cores_per_node} CPUs of a node / {site.gpus_per_node} GPUs"
        text += f" x {spec.gpus_per_process} GPUs" * (spec.gpus_per_process > 1)
    else:
        text = f"{site.cpus_per_process} for each device, which is a core here"
    several = spec.launcher == "torchrun" and spec.processes_per_node > 1
    return text + f" x {spec.processes_per_node} processes" * several


def gpu_rows(spec, site) -> list[tuple]:
    """Return the row that asks for GPUs, in the site's syntax; none where neither the job nor the site has any."""
    if site.gpus_per_node == 0 or spec.gpus_per_node == 0:
        return []
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    if site.gpu_syntax == "gpus-per-task":
        gpus = spec.gpus_per_process if spec.launcher == "srun" else spec.gpus_per_node
        return [("gpus-per-task", f"{kind}{gpus}", "GPUs of each task")]
    prefix = "gpu:" if site.gpu_syntax == "gres" else ""
    comment = f"on each node: {spec.processes_per_node} x {spec.gpus_per_process} (processes x GPUs of each)"
    return [(site.gpu_syntax, f"{prefix}{kind}{spec.gpus_per_node}", comment)]

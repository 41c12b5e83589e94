"""The sbatch file of a job: one pure function from a spec and a site to text that a learner can read and keep.

Kept by hand: the libraries that submit to Slurm hide this text, which is what the course teaches.
"""

import dataclasses
import shlex
from pathlib import PurePosixPath

from mpdemo.errors import UserError
from mpdemo.jobs.site import Site
from mpdemo.jobs.spec import JobSpec

WIDTH = 48  # column of the directives' comments


def render(spec: JobSpec, site: Site) -> str:
    """Return the sbatch file of a job on a site.

    Pure and deterministic: the same spec and site give the same text. All paths are relative to the project's root,
    from where the file is submitted (``sbatch slurm/NAME.sbatch``).

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
        ``requeue`` with torchrun, which hides the processes' exit status, or with a training that would start anew.
    """
    spec = dataclasses.replace(spec, launcher=spec.launcher or site.launcher)
    if spec.requeue and "train" in spec.command and "--resume" not in spec.command:
        raise UserError('requeue=True with a training that starts anew; do: train_command(..., resume="auto")')
    if spec.requeue and spec.launcher == "torchrun":
        raise UserError(
            "requeue=True with torchrun: it ends with status 1 also where its processes stopped with a checkpoint (3), "
            'so the script cannot tell; do: launcher="srun"'
        )
    lines = ["#!/bin/bash", *directives(spec, site), "", *environment(spec, site), "", *launch(spec), *ending(spec)]
    return "\n".join(lines) + "\n"


def directives(spec, site) -> list[str]:
    """The ``#SBATCH`` lines: what Slurm is asked for, each with its reason."""
    tasks = spec.processes_per_node if spec.launcher == "srun" else 1
    log = PurePosixPath(spec.out)
    rows = [
        ("job-name", spec.name, "what the queue shows"),
        ("nodes", spec.nodes, f"{spec.world_size} process{'es' if spec.world_size > 1 else ''} in all"),
        ("ntasks-per-node", tasks, tasks_comment(spec, site)),
        *gpu_rows(spec, site),
        ("cpus-per-task", spec.cpus_on(site) * spec.processes_per_node // tasks, cpus_comment(spec, site)),
        ("time", spec.time_limit, "the job is ended after this"),
        ("hint", site.hint, "one CPU per physical core" if site.hint == "nomultithread" else "how cores are counted"),
        ("mem", site.memory, "all of the node's memory" if site.memory == "0" else "memory of each node"),
        ("partition", site.partition, "which part of the cluster"),
        ("account", site.account, "whose hours are spent"),
        ("qos", site.qos, "the queue's class: limits and priority"),
        ("constraint", site.constraint, "the kind of node"),
        ("reservation", site.reservation, "nodes set aside for a course"),
        ("output", file_pattern(log / "slurm-%j.out"), "the log; Slurm does not make the folder"),
        ("error", file_pattern(log / "slurm-%j.err") if site.separate_errors else "", "what goes to stderr"),
        ("signal", spec.signal or "", "a warning to every process before the end"),
    ]
    lines = [directive(f"{option}={quote(value)}", comment) for option, value, comment in rows if value != ""]
    if spec.requeue:
        lines += [directive("requeue", "it may start again from its checkpoint")]
        lines += [directive("open-mode=append", "and then goes on in the same log")]
    else:
        lines += [directive("no-requeue", "a job that lost its node is not started again")]
    return lines


def directive(option, comment) -> str:
    text = f"#SBATCH --{option}"
    return f"{text:<{WIDTH}} # {comment}"


def quote(value) -> str:
    """Quote a value for sbatch's own reader of directives, which knows quotes and backslashes and no shell."""
    text = str(value)
    if text == shlex.quote(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def file_pattern(path) -> str:
    """A path for ``--output``: ``%`` begins a pattern there, so one in the folder's name is doubled."""
    return f"{str(path.parent).replace('%', '%%')}/{path.name}"


def tasks_comment(spec, site) -> str:
    if spec.launcher == "torchrun":
        return f"one torchrun per node, which starts {spec.processes_per_node}"
    if site.gpus_per_node and spec.gpus_per_process == 1:
        return "one task per process, one process per GPU"
    return "one task per process"


def cpus_comment(spec, site) -> str:
    """The arithmetic behind the CPUs of a task."""
    if spec.cpus_per_process is not None:
        text = f"{spec.cpus_per_process} asked for"
    elif site.gpus_per_node:
        text = f"{site.cores_per_node} cores of a node / {site.gpus_per_node} GPUs"
        text += f" x {spec.gpus_per_process} GPUs" * (spec.gpus_per_process > 1)
    else:
        text = f"{site.cores_per_node} cores of a node / {spec.processes_per_node} processes"
    several = spec.launcher == "torchrun" and spec.processes_per_node > 1
    return text + f" x {spec.processes_per_node} processes" * several


def gpu_rows(spec, site) -> list[tuple]:
    """The line that asks for GPUs, in the site's syntax; none where neither the job nor the site has any."""
    if site.gpus_per_node == 0 or spec.gpus_per_node == 0:
        return []
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    if site.gpu_syntax == "gpus-per-task":
        gpus = spec.gpus_per_process if spec.launcher == "srun" else spec.gpus_per_node
        return [("gpus-per-task", f"{kind}{gpus}", "GPUs of each task")]
    prefix = "gpu:" if site.gpu_syntax == "gres" else ""
    comment = f"on each node: {spec.processes_per_node} x {spec.gpus_per_process} (processes x GPUs of each)"
    return [(site.gpu_syntax, f"{prefix}{kind}{spec.gpus_per_node}", comment)]


def environment(spec, site) -> list[str]:
    """What the processes need to find each other."""
    lines = ["# The Python of this site.", *site.setup, ""] if site.setup else []
    lines += [
        "# Where the processes meet: the job's first node, and a port that no other job of the node has.",
        f'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1){site.master_suffix}',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "export MASTER_ADDR MASTER_PORT",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit --cpus-per-task",
        "export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1     # one thread per process; lines appear as they are printed",
    ]
    if site.export_visible_devices and spec.gpus_per_node:
        lines.append(f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(spec.gpus_per_node)))}")
    if spec.launcher == "torchrun" and spec.signal:
        lines.append(f"export PET_SIGNALS_TO_HANDLE={spec.handled_signals}")
    return lines


def launch(spec) -> list[str]:
    """The one command that starts every process."""
    arguments = shlex.join(spec.command)
    srun = "srun --kill-on-bad-exit=1 --label"
    if spec.launcher == "srun":
        return ["# One process per task; when one fails, all end.", f"{srun} \\", f"  python -u {arguments}"]
    is_program = spec.command[0] == "-m" or spec.command[0].endswith(".py")
    return [
        "# One torchrun per node; single quotes, since SLURM_NODEID is known on each node only.",
        f"{srun} bash -c 'exec python -m torch.distributed.run \\",
        f'  --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node={spec.processes_per_node} \\',
        '  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"\' \\',
        f"  torchrun {'' if is_program else '--no-python python '}{arguments}",
    ]


def ending(spec) -> list[str]:
    """What follows the command: its status is kept, and a stopped job queued again."""
    lines = [
        "status=$?",
        "",
        "# The job's number and exit status, for the day when Slurm has forgotten the job.",
        f'echo "$SLURM_JOB_ID $status" > {shlex.quote(f"{spec.out}/exit-status.txt")}',
    ]
    if spec.requeue:
        lines += [
            "# 3: stopped with a checkpoint. Back into the queue, to go on from there.",
            '[ "$status" -eq 3 ] && scontrol requeue "$SLURM_JOB_ID"',
        ]
    return [*lines, 'exit "$status"']

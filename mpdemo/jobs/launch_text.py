"""The commands of a job's sbatch file: its folder, its Python, its launch, its end. See `mpdemo.jobs.sbatch_text`."""

import dataclasses
import shlex

from mpdemo.jobs.array import INDEX
from mpdemo.paths import SITES
from mpdemo.world.launch import for_torchrun, is_program

# Run after each line of the site's setup. Neither `set -e` nor `set -u`: `module` and `conda activate` are functions of
# the shell, which use commands that may fail and variables that are not set. The status of the whole line counts.
SETUP_OK = """\
setup_ok() {
  status=$?
  [ "$status" -eq 0 ] && return
  echo "setup line failed with exit status $status: $1" >&2
  echo "%s 1" > %s
  exit 1
}"""

LAST_CALL = 15  # s for which nodes that are left wait for others before they go on: as long as one counts as alive

# Slurm's CHANGELOG: 22.05 took the inheritance away, 23.11 gave it back; the line does no harm in other releases.
INHERITS_NOT = "srun of Slurm 22.05 to 23.02 does not inherit --cpus-per-task"


def project(spec, site) -> list[str]:
    """Go to the project's root, so that the file can be submitted from any folder of it, and make the run's folder."""
    lines = [
        "# The project: the folder where sbatch was called, or one above it. Slurm runs a copy of this file elsewhere.",
        f"until [ -d {SITES} ]; do",
        '  [ "$PWD" = / ] && echo "call sbatch in the project\'s folder: cd .../mpdemo; sbatch slurm/..." && exit 2',
        "  cd ..",
        "done",
        f"mkdir -p {folder(spec)}",
    ]
    if not site.setup:
        lines.append('[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"  # the Python that `make` installed')
    return lines


def folder(spec) -> str:
    """The run's folder, as a word of the shell; each element of an array has its own below it."""
    return shlex.quote(spec.out) + ('/"$SLURM_ARRAY_TASK_ID"' if spec.array else "")


def job_number(spec) -> str:
    """The job's number, as it stands between double quotes of the shell."""
    return "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if spec.array else "$SLURM_JOB_ID"


def arguments(spec) -> str:
    """The command's arguments as words of the shell, with the element's number where an array says ``{index}``."""
    if not spec.array:
        return shlex.join(spec.command)
    number = '"$SLURM_ARRAY_TASK_ID"'
    return " ".join(
        number.join(shlex.quote(part) if part else "" for part in argument.split(INDEX)) or "''"
        for argument in spec.command
    )


def setup(spec, site) -> list[str]:
    """The site's own lines. One that fails ends the job, which would go on with another Python otherwise."""
    if not site.setup:
        return []
    marker = f"{folder(spec)}/exit-status.txt"
    checked = [line for text in site.setup for line in (text, f"setup_ok {shlex.quote(text)}")]
    return [
        "# The Python of this site. A line that fails ends the job.",
        *(SETUP_OK % (job_number(spec), marker)).splitlines(),
        *checked,
        "",
    ]


def environment(spec, site) -> list[str]:
    """What the processes need to find each other."""
    lines = [
        *setup(spec, site),
        "# Where the processes meet: the job's first node, and a port made from the job's number.",
        f'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1){site.master_suffix}',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "export MASTER_ADDR MASTER_PORT",
        f"export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # {INHERITS_NOT}",
        "export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1     # one thread per process; lines appear as they are printed",
    ]
    if site.export_visible_devices and spec.gpus_per_node:
        lines.append(f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(spec.gpus_per_node)))}")
    if spec.launcher == "torchrun" and spec.signal:
        lines.append(torchrun_signals(spec))
    return lines


def torchrun_signals(spec) -> str:
    """The line that tells torchrun which signals to pass on, and how long to wait afterwards."""
    return "export " + " ".join(f"{name}={value}" for name, value in spec.torchrun_signals.items())


def launch(spec, site) -> list[str]:
    """The one command that starts every process."""
    failed = "--no-kill --kill-on-bad-exit=0" if spec.least_nodes else "--kill-on-bad-exit=1"
    srun = " ".join([f"srun {failed} --label", *site.srun_options])
    if spec.launcher == "srun":
        srun = " ".join([srun, *site.binding])
        start = in_each_task(site) if site.each_task else f"{site.python} -u"
        return ["# One process per task; when one fails, all end.", f"{srun} \\", f"  {start} {arguments(spec)}"]
    passed_on = dataclasses.replace(spec, command=tuple(for_torchrun(spec.command)))
    return [
        "# One torchrun per node; single quotes, since SLURM_NODEID is known on each node only.",
        f"{srun} bash -c 'exec {in_quotes(site.python)} -m torch.distributed.run \\",
        *rendezvous(spec),
        f"  torchrun {'' if is_program(spec.command) else '--no-python python '}{arguments(passed_on)}",
    ]


def rendezvous(spec) -> list[str]:
    """How the torchruns of all nodes meet: once, or again whenever one of them is gone.

    The second kind reads what others write as pickles, on a port that all users of the cluster's network can reach.
    """
    processes = f"--nproc-per-node={spec.processes_per_node}"
    if not spec.least_nodes:
        return [
            f'  --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" {processes} \\',
            '  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"\' \\',
        ]
    return [
        f'  --nnodes={spec.least_nodes}:"$SLURM_NNODES" {processes} --max-restarts={spec.nodes - spec.least_nodes} \\',
        '  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\',
        f'  --rdzv-conf=is_host="$((SLURM_NODEID == 0))",last_call_timeout={LAST_CALL} "$@"\' \\',
    ]


def in_each_task(site) -> str:
    """What each task runs: the site's lines, then Python with the task's arguments."""
    lines = " && ".join([*site.each_task, f'exec {site.python} -u "$@"'])
    return f"bash -c '{in_quotes(lines)}' task \\\n "


def in_quotes(text) -> str:
    """A text as it stands between single quotes of the shell."""
    return text.replace("'", "'\\''")


def ending(spec) -> list[str]:
    """What follows the command: its status is kept, and a stopped job queued again."""
    lines = [
        "status=$?",
        "",
        "# The job's number and exit status, for the day when Slurm has forgotten the job.",
        f'echo "{job_number(spec)} $status" > {folder(spec)}/exit-status.txt',
    ]
    if spec.requeue:
        lines += [
            "# 3: stopped with a checkpoint. Back into the queue, to go on from there.",
            '[ "$status" -eq 3 ] && scontrol requeue "' + job_number(spec) + '"',
        ]
    return [*lines, 'exit "$status"']

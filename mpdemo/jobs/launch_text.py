"""The commands of a job's sbatch file: its folder, its Python, its launch, its end. See `mpdemo.jobs.sbatch_text`."""

import shlex

from mpdemo.world.launch import for_torchrun, is_program

LAST_CALL = 15  # s for which nodes that are left wait for others before they go on: as long as one counts as alive

PROJECT = """\
# The project: the folder where sbatch was called, or one above it. Slurm runs a copy of this file elsewhere.
until [ -d slurm/sites ]; do
  [ "$PWD" = / ] && echo "call sbatch in the project's folder: cd .../mpdemo; sbatch slurm/..." && exit 2
  cd ..
done
mkdir -p {out}
{venv}
"""
VENV = '[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"  # the Python that `make` installed\n'

# Run after each line of the site's setup. Neither `set -e` nor `set -u`: `module` and `conda activate` are functions of
# the shell, which use commands that may fail and variables that are not set. The status of the whole line counts.
SETUP = """\
# The Python of this site. A line that fails ends the job.
setup_ok() {
  status=$?
  [ "$status" -eq 0 ] && return
  echo "setup line failed with exit status $status: $1" >&2
  echo "$SLURM_JOB_ID 1" > {out}/exit-status.txt
  exit 1
}
{setup}

"""

# Slurm's CHANGELOG: 22.05 took the inheritance away, 23.11 gave it back; the line does no harm in other releases.
MEET = """\
# Where the processes meet: the job's first node, and a port made from the job's number.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1){master_suffix}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun of Slurm 22.05 to 23.02 does not inherit --cpus-per-task
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1     # one thread per process; lines appear as they are printed
{exports}
"""

TASKS = """\
# One process per task; when one fails, all end.
srun {failed} --label{srun_options} \\
  {start} {command}
"""

TORCHRUN = """\
# One torchrun per node; single quotes, since SLURM_NODEID is known on each node only.
srun {failed} --label{srun_options} bash -c 'exec {python} -m torch.distributed.run \\
{rendezvous}
  torchrun {no_python}{command}
"""

RENDEZVOUS = """\
  --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node={processes} \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"' \\"""

# The torchruns of all nodes meet again whenever one of them is gone. They read what others write as pickles, on a port
# that all users of the cluster's network can reach.
RENDEZVOUS_AGAIN = """\
  --nnodes={least}:"$SLURM_NNODES" --nproc-per-node={processes} --max-restarts={losses} \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\
  --rdzv-conf=is_host="$((SLURM_NODEID == 0))",last_call_timeout={last_call} "$@"' \\"""

END = """\
status=$?

# The job's number and exit status, for the day when Slurm has forgotten the job.
echo "$SLURM_JOB_ID $status" > {out}/exit-status.txt
{requeue}exit "$status\""""

REQUEUE = """\
# 3: stopped with a checkpoint. Back into the queue, to go on from there.
[ "$status" -eq 3 ] && scontrol requeue "$SLURM_JOB_ID"
"""


def commands(spec, site) -> list[str]:
    """Return the lines below the directives; the spec names its launcher."""
    out = shlex.quote(spec.out)
    setup = "\n".join(line for text in site.setup for line in (text, f"setup_ok {shlex.quote(text)}"))
    text = filled(PROJECT, venv="" if site.setup else VENV, out=out)
    text += filled(SETUP, out=out, setup=setup) if site.setup else ""
    text += filled(MEET, master_suffix=site.master_suffix, exports=exports(spec, site))
    text += launch(spec, site)
    return (text + filled(END, requeue=REQUEUE if spec.requeue else "", out=out)).splitlines()


def filled(text, **words) -> str:
    """Return a template with its words in, what a user wrote last; a shell's own braces stay."""
    for name, value in words.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def exports(spec, site) -> str:
    """Return what else the processes' environment must hold, a line each."""
    lines = []
    if site.export_visible_devices and spec.gpus_per_node:
        lines.append(f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(spec.gpus_per_node)))}\n")
    if spec.launcher == "torchrun" and spec.signal:
        lines.append("export " + " ".join(f"{name}={value}" for name, value in torchrun_signals(spec).items()) + "\n")
    return "".join(lines)


def torchrun_signals(spec) -> dict:
    """Return variables for torchrun: the signals that it passes on (its own and the warning), and how long it waits.

    Without the second it would kill its processes after 30 s, in the middle of a checkpoint.
    """
    name, _, seconds = (spec.signal or "USR1").partition("@")
    names = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", f"SIG{name}"]
    handled = {"PET_SIGNALS_TO_HANDLE": ",".join(dict.fromkeys(names))}
    return handled | ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds} if seconds else {})


def launch(spec, site) -> str:
    """Return the one command that starts every process."""
    words = {"failed": "--no-kill --kill-on-bad-exit=0" if spec.least_nodes else "--kill-on-bad-exit=1"}
    if spec.launcher == "srun":
        start = in_each_task(site) if site.each_task else f"{site.python} -u"
        words |= {"srun_options": options(*site.srun_options, *site.binding), "start": start}
        return filled(TASKS, **words, command=shlex.join(spec.command))
    rendezvous = filled(
        RENDEZVOUS_AGAIN if spec.least_nodes else RENDEZVOUS,
        processes=spec.processes_per_node,
        least=spec.least_nodes,
        losses=spec.nodes - (spec.least_nodes or 0),
        last_call=LAST_CALL,
    )
    words |= {"srun_options": options(*site.srun_options), "python": in_quotes(site.python), "rendezvous": rendezvous}
    words |= {"no_python": "" if is_program(spec.command) else "--no-python python "}
    return filled(TORCHRUN, **words, command=shlex.join(for_torchrun(spec.command)))


def options(*words) -> str:
    """Return options as they follow another one."""
    return "".join(f" {word}" for word in words)


def in_each_task(site) -> str:
    """Return what each task runs: the site's lines, then Python with the task's arguments."""
    lines = " && ".join([*site.each_task, f'exec {site.python} -u "$@"'])
    return f"bash -c '{in_quotes(lines)}' task \\\n "


def in_quotes(text) -> str:
    """Return a text as it stands between single quotes of the shell."""
    return text.replace("'", "'\\''")

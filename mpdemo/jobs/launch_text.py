"""The commands of a batch script: its folder, its Python, its launch. See `mpdemo.jobs.sbatch_text`."""

import re
import shlex

# A signal would run the first trap at once, with status 0: the second one makes bash wait for srun.
COURSE = """\
# What only this course needs: its folder, its Python, and how a job ended that Slurm has forgotten.
until [ -d slurm/sites ]; do [ "$PWD" != / ] && cd .. || { echo "call sbatch in the project's folder"; exit 2; }; done
"""
VENV = '[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"'

# Neither `set -e` nor `set -u`: `module` and `conda activate` are functions of the shell, which use commands that may
# fail and variables that are not set. The status of each whole line counts.
FAILED = 'failed() { echo "setup line failed with exit status $?: $1" >&2; exit 1; }'
EXPORT = re.compile(r"export [^`;&|()#\\]*")  # a line that cannot fail
# more than a line
BLOCK = re.compile(r"\s|(if|then|else|elif|fi|for|while|until|do|done|case|esac)\b|[{}]|\w+ *\(\)")

FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
MASTER_PORT = """\
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # on the first node, which runs these lines
while ss -ltn | grep -q ":$MASTER_PORT "; do ((MASTER_PORT++)); done  # in use there: take the next"""
QUOTES = "# One torchrun per node; single quotes, since SLURM_NODEID is known on each node only."
BINDING = {"cpu-bind", "gpu-bind", "mem-bind", "distribution"}


def course(spec, site) -> str:
    """Return the lines that find the course's folder and note how the job ended."""
    out = shlex.quote(spec.out)
    note = f'echo "$SLURM_JOB_ID $?" > {out}/exit-status.txt'
    trap = f"trap {shlex.quote(note)} EXIT; trap : TERM"
    return "\n".join([f"{COURSE}mkdir -p {out}", *([trap, FAILED] if site.setup else [VENV, trap])])


def setup_line(line) -> str:
    """Return a line of the site's own that ends the job where it fails; a part of a longer command stays as it is."""
    if EXPORT.fullmatch(line) or not line.partition("#")[0].strip() or BLOCK.match(line):
        return line
    whole = "{ " + line + "\n}" if re.search(r"#|[;&\\]\s*$", line) else line
    return f"{whole} || failed {shlex.quote(line)}"


def environment(spec, site) -> str:
    """Return what the processes' environment must hold, a line each."""
    lines = [] if by_itself(spec) else [MASTER_PORT]
    lines.append("export PYTHONUNBUFFERED=1  # lines appear as they are printed")
    if not any("OMP_NUM_THREADS" in line for line in site.setup):
        lines.append("export OMP_NUM_THREADS=1  # one thread per process")
    if spec.gpus_per_node and site.gpus_per_node:
        lines.append("# export NCCL_DEBUG=INFO  # when it hangs or is slow")
    return "\n".join(lines)


def by_itself(spec) -> bool:
    """Whether one torchrun starts every process: they meet without an address."""
    return spec.launcher == "torchrun" and spec.nodes == 1


def signals(spec) -> str:
    """Return the line that tells a torchrun which signals it passes on, and how long it waits."""
    if spec.launcher != "torchrun" or not spec.signal:
        return ""
    name, _, seconds = spec.signal.partition("@")
    names = dict.fromkeys(["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", f"SIG{name}"])
    # Without the second variable it kills its processes after 30 s, in the middle of a checkpoint.
    return f"export PET_SIGNALS_TO_HANDLE={','.join(names)} TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds}\n"


def launch(spec, site, options) -> str:
    """Return the lines that start every process: a task each, or one torchrun per node that starts them."""
    ours = ['--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--kill-on-bad-exit=1", "--label"]
    given = unbound(options, spec)
    names = {option_name(option) for option in given}
    srun = " ".join(["srun", *(option for option in ours if option_name(option) not in names), *given])
    if spec.launcher == "srun":
        return f"{srun} \\\n  {site.python} {lines_of(spec.command)}"
    # torchrun starts no option such as -c
    as_it_is = spec.command[0] == "-m" or spec.command[0].endswith(".py")
    program = "" if as_it_is else "--no-python python "
    # it reads $$ and ${local_rank} as its own
    unchanged = [word.replace("$", "$$") for word in spec.command]
    started = f"{program}{lines_of(unchanged)}"
    if by_itself(spec):
        torchrun = f"{site.python} -m torch.distributed.run --standalone --nproc-per-node={spec.processes_per_node}"
        return signals(spec) + " \\\n  ".join([srun, torchrun, started])
    python = site.python.replace("'", "'\\''")  # as it stands between single quotes
    torchrun = f"bash -c 'exec {python} -m torch.distributed.run"
    nodes = (
        f'--nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node={spec.processes_per_node}'
    )
    meet = '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"\''
    return (
        signals(spec) + f"{QUOTES}\n" + " \\\n  ".join([srun, torchrun, nodes, meet, f"torchrun {started}"])
    )


def unbound(options, spec) -> list[str]:
    """Return options of srun; under torchrun without those that would bind all of its processes like one task."""
    bound = BINDING if spec.launcher == "torchrun" else ()
    return [option for option in options if option_name(option) not in bound]


def option_name(text) -> str:
    """Return ``mem`` of ``--mem=4G``."""
    return text.removeprefix("--").partition("=")[0]


def lines_of(command) -> str:
    """Return a command as one writes it by hand: each option on a line of its own."""
    return " ".join(
        f"\\\n  {word}" if word.startswith("--") else word for word in map(shlex.quote, command)
    )

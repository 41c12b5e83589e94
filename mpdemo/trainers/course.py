"""The jobs of the course: the `JobSpec` of each committed batch script, read back from its text.

The notebooks say what their jobs are and write ``slurm/*.sbatch``; these files are the one list of them. Nothing is
kept twice: a spec counts only if it renders to the very text that it was read from.
"""

import re
import shlex
import time

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, load_site, render

PLAIN = "generic"  # the site for which the committed files are written
DIRECTIVE = re.compile(r"^#SBATCH --([\w-]+)(?:=(\S+))? *# (.*)$", re.MULTILINE)
SRUN = re.compile(r"^  python -u (.*)$", re.MULTILINE)
TORCHRUN = re.compile(r"--nproc-per-node=(\d+)[^\n]*\n[^\n]*\n  torchrun (?:--no-python python )?(.*)$", re.MULTILINE)


def jobs_of_course() -> dict:
    """Return the jobs of the course by the name of their files: ``03_ddp`` -> `JobSpec`.

    The files are those that came with mpdemo and those in ``slurm/`` of the folder one works in, which count more.
    """
    site, specs = load_site(PLAIN), {}
    for _, file in sorted(paths.slurm_files("*.sbatch").items()):
        text = file.read_text(encoding="utf-8", errors="replace")
        specs[file.stem] = spec = read_job(text)
        if spec is None or render(spec, site) != text:
            why = f"{file} is not as its notebook writes it for slurm/sites/{PLAIN}.toml"
            raise UserError(f"{why}; run the notebook's cell again, or move a file of your own to another folder")
    return specs


def read_job(text) -> JobSpec | None:
    """Read the text of a batch script that was rendered for the plain site; None if it is another kind of file."""
    rows = {name: (value, comment) for name, value, comment in DIRECTIVE.findall(text)}
    by_torchrun, by_srun = TORCHRUN.search(text), SRUN.search(text)
    try:
        processes = int(by_torchrun[1] if by_torchrun else rows["ntasks-per-node"][0])
        cpus, arithmetic = rows["cpus-per-task"]
        return JobSpec(
            name=rows["job-name"][0],
            command=tuple(shlex.split(by_torchrun[2] if by_torchrun else by_srun[1])),
            out=shlex.split(re.search(r"^mkdir -p (.*)$", text, re.MULTILINE)[1])[0],
            nodes=int(rows["nodes"][0]),
            processes_per_node=processes,
            gpus_per_process=int(rows.get("gres", ("gpu:0",))[0].rpartition(":")[2]) // processes,
            cpus_per_process=int(cpus) // (processes if by_torchrun else 1) if "asked for" in arithmetic else None,
            time_limit=rows["time"][0],
            launcher="torchrun" if by_torchrun else None,
            dependency=rows.get("dependency", (None,))[0],
            signal=rows.get("signal", (None,))[0],
            requeue="requeue" in rows,
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, UserError):
        return None


def run_at_once(waiting, start, at_once, wait):
    """Start jobs, at most `at_once` at a time, and yield each item of `waiting` with its job as that ends.

    ``start(item)`` returns the job, or None if it was refused. `TimeoutError` once `wait` seconds have passed.
    """
    end, waiting, running = time.monotonic() + wait, list(waiting), []
    while waiting or running:
        if time.monotonic() > end:
            raise TimeoutError
        if waiting and len(running) < at_once:
            item = waiting.pop(0)
            running.append((item, start(item)))
        for item, job in [(item, job) for item, job in running if job is None or job.finished]:
            running.remove((item, job))
            yield item, job
        time.sleep(0.05)

"""The jobs of the course: the `JobSpec` of each committed job file, read back from its text.

The notebooks say what their jobs are and write ``slurm/*.sbatch``; these files are the one list of them. Nothing is
kept twice: a spec counts only where it renders to the very text that it was read from.
"""

import re
import shlex

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs.sbatch_text import render
from mpdemo.jobs.site import load_site
from mpdemo.jobs.spec import JobSpec

PLAIN = "generic"  # the site for which the committed files are written
DIRECTIVE = re.compile(r"^#SBATCH --([\w-]+)(?:=(\S+))? *# (.*)$", re.MULTILINE)
SRUN = re.compile(r"^  python -u (.*)$", re.MULTILINE)
TORCHRUN = re.compile(r"--nproc-per-node=(\d+)[^\n]*\n[^\n]*\n  torchrun (?:--no-python python )?(.*)$", re.MULTILINE)


def course_jobs() -> dict:
    """Return the jobs of the course, by the name of their files: ``03_ddp`` -> `JobSpec`.

    The files are those that came with mpdemo and those in ``slurm/`` of the folder one works in, which count more.

    Raises
    ------
    UserError
        One of the files is not as a notebook writes it.
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
    """Read the text of a job file that was rendered for the plain site; None if it is another kind of file."""
    rows = {name: (value, comment) for name, value, comment in DIRECTIVE.findall(text)}
    by_torchrun, by_srun = TORCHRUN.search(text), SRUN.search(text)
    try:
        command = by_torchrun[2] if by_torchrun else by_srun[1]
        folder = shlex.split(re.search(r"^mkdir -p (.*)$", text, re.MULTILINE)[1])[0]
        processes = int(by_torchrun[1] if by_torchrun else rows["ntasks-per-node"][0])
        cpus, arithmetic = rows["cpus-per-task"]
        return JobSpec(
            name=rows["job-name"][0],
            command=tuple(shlex.split(command)),
            out=folder,
            nodes=int(rows["nodes"][0]),
            processes_per_node=processes,
            gpus_per_process=int(rows.get("gres", ("gpu:0",))[0].rpartition(":")[2]) // processes,
            cpus_per_process=int(cpus) // (processes if by_torchrun else 1) if "asked for" in arithmetic else None,
            time_limit=rows["time"][0],
            launcher="torchrun" if by_torchrun else None,
            dependency=rows["dependency"][0] if "dependency" in rows else None,
            signal=rows["signal"][0] if "signal" in rows else None,
            requeue="requeue" in rows,
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, UserError):
        return None

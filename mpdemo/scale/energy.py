"""The energy of a job, where the machine tells: Slurm's own count, or the processor's counter (RAPL).

Both are of whole nodes. A job on this machine is charged with all that the processor used meanwhile.
"""

import json
from pathlib import Path

from mpdemo.jobs import SlurmError, slurm
from mpdemo.jobs.job import HERE

RAPL = Path("/sys/class/powercap")  # https://docs.kernel.org/power/powercap/powercap.html
NOT_TOLD = "not told"


def rapl_joules(folder=RAPL) -> dict | None:
    """Return the counters of all processor packages, by name: joules, and where they begin again; None if unreadable.

    Parameters
    ----------
    folder : Path
        Holds one ``intel-rapl:N`` for each package (also on AMD).
    """
    try:
        return {
            package.name: (
                int((package / "energy_uj").read_text()) / 1e6,
                int((package / "max_energy_range_uj").read_text()) / 1e6,
            )
            for package in sorted(Path(folder).glob("intel-rapl:*"))
            if package.name.count(":") == 1  # the parts of a package are counted in it
        } or None
    except (OSError, ValueError):
        return None  # most kernels show it to root only


def difference(before, after) -> float | None:
    """Return the joules between two readings; a counter that has begun again is taken to have done so once."""
    if not before or not after or before.keys() != after.keys():
        return None
    return sum((after[name][0] - joules) % top for name, (joules, top) in before.items())


def slurm_joules(job_id) -> float | None:
    """Return ``ConsumedEnergyRaw`` of a job's steps; None without accounting, or where the nodes have no meter."""
    try:
        rows = slurm.client("sacct", "-n", "-P", "-j", job_id, "-o", "ConsumedEnergyRaw").split()
    except SlurmError:
        return None
    counted = [float(row) for row in rows if row.isdigit()]
    return max(counted, default=0) or None  # the job's own line, where there is one, holds the sum


def used(job, before) -> float | None:
    """Return the joules of a job that has ended, None where nobody tells.

    What was measured is kept in the run's folder, for a later call that finds the job there.

    Parameters
    ----------
    job : mpdemo.jobs.Job
    before : dict or None
        `rapl_joules` when it was submitted; None for a job that was found. It counts for a job on this machine only.
    """
    if job.where != HERE:  # a step of the notebook's own job has no number with which Slurm could be asked
        return slurm_joules(job.id) if job.where.startswith("cluster") else None
    file = job.out / "energy.json"
    if before:
        file.write_text(json.dumps({"job": job.id, "joules": difference(before, rapl_joules())}))
    kept = json.loads(file.read_text()) if file.exists() else {}
    return kept.get("joules") if kept.get("job") == job.id else None

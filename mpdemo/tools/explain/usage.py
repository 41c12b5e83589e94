"""What a job uses, in a line as of ``seff``: processors, memory, GPUs. By Slurm's counts, and by the run's own metrics.

Sources: https://slurm.schedmd.com/sstat.html (while a job runs), https://slurm.schedmd.com/sacct.html (after its end,
where accounting is on).
"""

import re

from mpdemo.jobs import slurm
from mpdemo.training.log import rows_in

UNITS = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20, "": 2**-20}  # of Slurm's memory, in MiB
UNKNOWN = "not known: Slurm counts it where accounting is on, a training run of the course writes it itself"


def usage(slurm_id, state, folder) -> str:
    """Return in a line what a job used: of the Slurm in reach ("" for none), with its run's folder (None for none)."""
    parts = of_slurm(slurm_id, state) if slurm_id else []
    return "; ".join(parts + of_run(folder)) or UNKNOWN


def of_slurm(job_id, state) -> list[str]:
    """Return what Slurm counted."""
    try:
        if state == "running":
            steps = table("sstat", "-a", "-o", "AveCPU,NTasks,MaxRSS", "-j", job_id)
            ((cpus, ran),) = table("squeue", "-o", "%C|%M", "-j", job_id)
            work = sum(seconds(average) * int(tasks) for average, tasks, _ in steps)
            return in_words(work, int(cpus) * seconds(ran), cpus, [memory for *_, memory in steps])
        rows = table("sacct", "-o", "TotalCPU,AllocCPUS,ElapsedRaw,MaxRSS,TRESUsageInAve", "-j", job_id)
        work, cpus, ran, *_ = rows[0]  # of the job; its steps follow
        gpu = re.findall(r"gres/gpuutil=(\d+)", " ".join(row[4] for row in rows))
        parts = in_words(seconds(work), int(cpus) * float(ran), cpus, [row[3] for row in rows])
        return parts + [f"GPUs busy {max(map(int, gpu))} % of the time"] * bool(gpu)
    except (slurm.SlurmError, ValueError, IndexError):  # no accounting, or another format
        return []


def table(client, *words) -> list:
    """Return the fields of each line that one of Slurm's commands prints."""
    how = ("-h",) if client == "squeue" else ("-n", "-P")
    return [line.split("|") for line in slurm.client(client, *how, *words).splitlines()]


def in_words(work, possible, cpus, memories) -> list[str]:
    """Return the share of the processors' time that was used, and the largest memory of a process."""
    found = [re.fullmatch(r"([\d.]+)([KMGT]?)n?", text) for text in memories]  # 310M or 12345K
    mib = max((float(match[1]) * UNITS[match[2]] for match in found if match), default=0)
    share = [f"{work / possible:.0%} of {cpus} CPUs"] if possible else []
    return share + [f"at most {mib:.0f} MiB in a process"] * (mib > 0)


def seconds(text) -> int:
    """Return the seconds of a time as Slurm counts it, with or without fractions."""
    return slurm.seconds(text.partition(".")[0]) if text else 0


def of_run(folder) -> list[str]:
    """Return what the newest line of a training run's metrics holds of its memory and its GPUs."""
    rows = [row for row in rows_in(folder) if row.get("peak_memory_mib")] if folder else []
    if not rows:
        return []
    memory = ", ".join(f"{mib:.0f}" for mib in rows[-1]["peak_memory_mib"])
    busy = ", ".join(f"{share:.0%}" for share in rows[-1].get("utilisation") or ())
    return [f"at most {memory} MiB in the ranks"] + [f"their devices busy {busy}"] * bool(busy)

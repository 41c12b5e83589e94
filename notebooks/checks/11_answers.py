"""Check of notebook 11: a batch script in which two ranks must meet."""

import re

from checks.job_files import READ, TRIED, check_text, printed_by_job
from mpdemo.jobs.check import Script

MEET = "mpdemo.labs.failures.meet"  # what the script starts
NUMBER = r"[\"']?(\d+|\$\w+|\$\{[^}]*\})"
CPUS = re.compile(rf"(?<!\S)(?:-c ?|--cpus-per-task[= ]){NUMBER}")  # of srun
EXPORTED = re.compile(rf"\bSRUN_CPUS_PER_TASK={NUMBER}")
ALL_NODES = {  # values of MASTER_ADDR that are more than one name
    r"\$\{?SLURM_(?:JOB_)?NODELIST\}?": "the list of all nodes in Slurm's short form",
    r"(?:\$\(|`)\s*scontrol show hostnames?\b[^|)`]*[)`]": "the names of all nodes",
}


def check_11_5(path):
    read(check_text(path))
    printed = printed_by_job(path)
    if printed is not None:
        met = [line for line in printed if line.startswith("rank ")]
        assert len(met) == 2, f"It ran, and printed: {'; '.join(met or printed) or 'nothing'}."
        assert all("of 2: met the others" in line for line in met), f"It ran, and printed: {'; '.join(met)}."
    how = READ if printed is None else TRIED
    return f"{how} Three of the four mistakes gave no message that names them: check a script before you submit it."


def read(text):
    """Judge the text: it is all that is known where no Slurm can be started."""
    script = Script(text)
    nodes, cpus = script.number("nodes"), script.number("cpus-per-task")
    tasks = nodes * script.number("ntasks-per-node")
    assert (nodes, tasks, cpus) == (2, 2, 4), f"Slurm reads {nodes} nodes, {tasks} tasks, CPUs per task: {cpus}."
    given = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "), flags=re.M)
    launch, program, _ = next((line for line in given.splitlines() if MEET in line), "").partition("python")
    assert program and re.search(r"\bsrun\b", launch), "No srun starts the program in which the ranks meet."
    assert not re.search(r"localhost|127\.0\.0\.1", given), "On node 1, localhost is node 1: nothing listens there."
    for value, what in ALL_NODES.items():
        assignment = re.search(rf"""\bMASTER_ADDR=["']?{value}["']?(?=\s|;|$)""", given)
        fixed = assignment and re.search(r"\bMASTER_ADDR=|\bread\b.*\bMASTER_ADDR", given[assignment.end() :])
        assert not assignment or fixed, f"MASTER_ADDR holds {what}: no machine has such a name."
    step = CPUS.search(launch) or EXPORTED.search(given)
    assert step, "The job has 4 CPUs per task, but the step that srun starts has one, as in Slurm 22.05 to 23.02."
    wrong = step[1].isdecimal() and int(step[1]) != cpus
    assert not wrong, f"The job has {cpus} CPUs per task, but the step that srun starts has {step[1]}."

"""Checks of sitting 11: a function that knows its rank, two batch scripts."""

import re

from checks.job_files import READ, TRIED, printed_by_job
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script

OF_SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}
IN_THE_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
OF_TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
CASES = {
    "Under srun": (OF_SRUN, (5, 1, 8)),
    "Under torchrun": (OF_TORCHRUN, (3, 1, 4)),
    "Under a torchrun that srun started": (OF_SRUN | OF_TORCHRUN, (3, 1, 4)),
    "In a terminal": ({"HOME": "/home"}, (0, 0, 1)),
    "In a batch script that forgot srun": (IN_THE_SCRIPT, (0, 0, 1)),
}


def check_11_1(who_am_i):
    for place, (environ, right) in CASES.items():
        try:
            answer = who_am_i(dict(environ))
        except KeyError as error:
            raise AssertionError(f"{place} there is no {error}.") from None
        what = f"{place} it returned {answer!r}"
        assert isinstance(answer, tuple | list) and len(answer) == 3, f"{what}, not three numbers."
        assert all(type(number) is int for number in answer), (
            f"{what}: an environment variable is a string."
        )
        same = (
            "it has the right numbers in another order"
            if sorted(answer) == sorted(right)
            else f"not {right}"
        )
        assert tuple(answer) == right, f"{what}: {same}. Return rank, local rank and world size."


def check_11_2(path):
    how = runs_on_four_ranks(path)
    return f"{how} Slurm had accepted the broken one without a word: read a log's first lines before you walk away."


def check_11_3(path):
    how, script = runs_on_four_ranks(path), Script(path.read_text())
    assert script.value("time"), "It has no time limit; Slurm then takes the partition's, often many hours."
    limit = slurm.limit(script.value("time"))
    assert limit <= 300, f"Slurm would let it run for {limit // 60} minutes."
    log = script.value("output") or "slurm-%j.out"
    assert log.endswith("work/slurm-%j.out"), f"Its log would go to {log}."
    return f"{how} You need no package to submit a job: a text file and sbatch are enough."


def runs_on_four_ranks(path):
    """Require two nodes with two ranks and two GPUs each; return how that was found out."""
    printed = printed_by_job(path)
    if printed is None:
        read_four_ranks(path.read_text())
        return READ
    lines = [line.split(", GPUs ") for line in printed if line.startswith("rank ")]
    places = [place for place, _ in lines]
    wanted = [f"rank {rank} of 4: node {rank // 2}, local rank {rank % 2}" for rank in range(4)]
    assert places == wanted, f"It ran, and printed: {'; '.join(places or printed) or 'nothing'}."
    for node in (0, 1):
        seen = {gpu for _, names in lines[2 * node : 2 * node + 2] for gpu in names.split(",")}
        assert len(seen) == 2 and "none" not in seen, (
            f"The two ranks of node {node} see these GPUs: {sorted(seen)}."
        )
    return TRIED


def read_four_ranks(text):
    """Where no Slurm can be started: require the words that start four ranks."""
    script = Script(text)
    program = re.search(r"^\s*srun\b(?:(?! #).)*\bmpdemo\.labs\.hello\b", text.replace("\\\n", " "), re.M)
    assert program, (
        "srun doesn't start mpdemo.labs.hello: without it the program runs once, on the first node."
    )
    nodes, tasks = script.number("nodes"), script.number("ntasks-per-node")
    per_node = 2 if script.launcher == "torchrun" else tasks
    assert (nodes, per_node) == (2, 2), (
        f"Slurm reads {nodes} nodes with {tasks} tasks each (--ntasks-per-node)."
    )
    gpus = script.gpus_per_node(tasks)
    assert gpus == 2, f"It asks for {gpus or 'no'} GPUs on each node."

"""Checks of notebook 00: a program that splits images, a job's spec, a site file, two batch scripts, a job to stop."""

import contextlib
import io
import re
import tempfile
from pathlib import Path

from checks.job_files import READ, TRIED, printed_by_job, told
from mpdemo import jobs, ranks
from mpdemo.jobs import JobSpec, load_site, render, slurm
from mpdemo.jobs.check import Script

IMAGES = 10
ENDLESS = "runs/00_exercise"


def check_00_1(path):
    for processes in (2, 3):
        results = ranks.run_program(path.read_text(), "", world_size=processes, group=False, per_node=2)
        for _, _, error in results:
            assert not error, error
        printed = [numbers_of(rank, text) for rank, (text, _, _) in enumerate(results)]
        for image in range(IMAGES):
            times_printed = sum(numbers.count(image) for numbers in printed)
            assert times_printed, f"Started {processes} times, no process printed image {image}."
            assert times_printed == 1, f"Started {processes} times, image {image} was printed {times_printed} times."
        sizes = [len(numbers) for numbers in printed]
        fair = f"Started {processes} times, the processes had {' and '.join(map(str, sizes))} images."
        assert max(sizes) - min(sizes) <= 1, fair


def numbers_of(rank, text):
    lines = text.split()
    assert all(map(str.isdigit, lines)), f"Rank {rank} printed something that is no image: {text[:40]!r}."
    numbers = [int(line) for line in lines]
    most = max(numbers, default=0)
    assert most < IMAGES, f"Rank {rank} printed image {most}, which doesn't exist."
    return numbers


def check_00_2(spec):
    assert isinstance(spec, JobSpec), f"This is a {type(spec).__name__}; JobSpec(...) describes a job."
    assert "train" in spec.command, f"It runs another command: python {' '.join(spec.command)}."
    assert spec.out == "runs/big", f"Its log would go to {spec.out}."
    for problem in jobs.check(spec, "generic", ask_slurm=False):
        raise AssertionError(f"Its batch script would be refused: {problem.message}.")
    assert spec.gpus_per_process == 1, f"Each process would have {spec.gpus_per_process} GPUs."
    assert spec.world_size == 16, f"It would start {spec.world_size} processes."
    minutes, seconds = divmod(slurm.seconds(spec.time_limit), 60)
    read = f"Slurm reads the time limit {spec.time_limit!r} as {minutes} minutes and {seconds} seconds."
    assert (minutes, seconds) == (120, 0), read




def check_00_4(path):
    how = runs_on_four_ranks(path)
    return f"{how} Slurm had accepted the broken one without a word: read a log's first lines before you walk away."


def check_00_5(path):
    how, script = runs_on_four_ranks(path), Script(path.read_text())
    assert script.value("time"), "It has no time limit; Slurm then takes the partition's, often many hours."
    limit = slurm.limit(script.value("time"))
    assert limit <= 300, f"Slurm would let it run for {limit // 60} minutes."
    log = script.value("output")
    assert log, "It doesn't say where the log goes."
    assert log.endswith("work/slurm-%j.out"), f"Its log would go to {log}."
    return f"{how} You need no package to submit a job: a text file and sbatch are enough."


def runs_on_four_ranks(path):
    """Require two nodes with two ranks and two GPUs each; return how that was found out."""
    printed = printed_by_job(path)
    if printed is None:
        read_four_ranks(path.read_text())
        return READ
    lines = [line for line in printed if line.startswith("rank ")]
    assert lines, f"It ran, but no rank said who it is; it printed {'; '.join(printed) or 'nothing'}."
    places, gpus = zip(*(line.split(", GPUs ") for line in lines), strict=True)
    wanted = [f"rank {rank} of 4: node {rank // 2}, local rank {rank % 2}" for rank in range(4)]
    assert list(places) == wanted, f"It ran, and printed: {'; '.join(places)}."
    for node in (0, 1):
        seen = {gpu for names in gpus[2 * node : 2 * node + 2] for gpu in names.split(",")}
        assert len(seen) == 2 and "none" not in seen, f"The two ranks of node {node} see these GPUs: {sorted(seen)}."
    return TRIED


def read_four_ranks(text):
    """Where no Slurm can be started: require the words that start four ranks."""
    script = Script(text)
    program = re.search(r"^\s*srun\b(?:(?! #).)*\bmpdemo\.labs\.hello\b", text.replace("\\\n", " "), re.M)
    assert program, "srun doesn't start mpdemo.labs.hello: without it the program runs once, on the first node."
    nodes, tasks, torchrun = script.number("nodes"), script.number("ntasks-per-node"), script.launcher == "torchrun"
    assert nodes == 2, f"The number of its nodes is {nodes}."
    assert torchrun or tasks == 2, f"A node gets {tasks} of its tasks, since --ntasks-per-node says so or is missing."
    gpus = script.gpus_per_node(tasks)
    assert gpus == 2, f"It asks for {gpus or 'no'} GPUs on each node."


def check_00_6(stop):
    spec = JobSpec(name="exercise", command=("-c", "import time; time.sleep(60)"), out=ENDLESS)
    with contextlib.redirect_stdout(io.StringIO()):
        job = jobs.submit(spec, script=f"{ENDLESS}/job.sbatch", resubmit=True)
    try:
        returned = stop(ENDLESS)
        state = jobs.attach(ENDLESS).state
        assert state != "running", f"It returned {returned!r}, and the job is still running."
        assert state == "cancelled", f"It returned {returned!r}, and the job is {state}."
        assert returned == "cancelled", f"The job is cancelled, and the function returned {returned!r}."
    finally:
        job.cancel()
        with contextlib.suppress(TimeoutError):  # a Slurm that is silent now isn't the answer's fault
            job.wait(30, pending=30)

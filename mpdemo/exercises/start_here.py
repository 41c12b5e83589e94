"""The exercises of notebook 00: who am I, a job's spec, its file, its site, its end."""

import contextlib
import io
import re
import tempfile
from pathlib import Path

from mpdemo import jobs
from mpdemo.errors import UserError
from mpdemo.exercises.answers import letters_of
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.job_file import READ, TRIED, printed_by_job
from mpdemo.exercises.run import run_on_ranks
from mpdemo.jobs import JobSpec, load_site, render, times
from mpdemo.jobs.check import Script

IMAGES = 10
ENDLESS = "runs/00_exercise"


@exercise("00.1", expects='letters in one text, such as "bd"')
def what_belongs_in_a_job(answer):
    letters = letters_of(answer, "abcd")
    light = {"b": "Reading a small file", "d": "Writing a text"}
    for letter in sorted(letters & set(light)):
        raise Wrong(f"{light[letter]} ({letter}) takes milliseconds and little memory.")
    for letter, load in {"a": "ten epochs", "c": "a minute of timing"}.items():
        require(letter in letters, f"Who else feels {load} ({letter}) on a computer that all users share?")
    return "So the notebooks submit a training as a job, and read the files that it writes."


@exercise("00.2", expects="two whole numbers, such as (0, 1)")
def place_of_rank_nine(answer):
    node, local_rank = answer
    require((node, local_rank) != (1, 2), "This is (local rank, node); the node comes first.")
    require(0 <= node < 3, f"There are three nodes, 0, 1 and 2; there is no node {node}.")
    require(0 <= local_rank < 4, f"Four processes on a node have the local ranks 0 to 3, and not {local_rank}.")
    require((node, local_rank) == (2, 1), f"Local rank {local_rank} on node {node} is rank {4 * node + local_rank}.")
    return "Rank 9 computes on device 1 of its node, as the ranks 1 and 5 do on theirs."


@exercise("00.3", expects="a program that prints the numbers of its images")
def share_the_images(path):
    for processes in (2, 3):
        texts = run_on_ranks(path, processes=processes, per_node=2)
        printed = [_numbers(rank, text) for rank, text in enumerate(texts)]
        for image in range(IMAGES):
            times_printed = sum(numbers.count(image) for numbers in printed)
            require(times_printed, f"Started {processes} times, no process printed image {image}.")
            require(times_printed == 1, f"Started {processes} times, image {image} was printed {times_printed} times.")
        sizes = [len(numbers) for numbers in printed]
        fair = max(sizes) - min(sizes) <= 1
        require(fair, f"Started {processes} times, the processes had {' and '.join(map(str, sizes))} images.")
    return "It held for 2 and for 3 processes: the program is the same, only its variables differ."


def _numbers(rank, text) -> list[int]:
    lines = text.split()
    require(all(line.isdigit() for line in lines), f"Rank {rank} printed something that is no image: {text[:40]!r}.")
    numbers = [int(line) for line in lines]
    require(all(n < IMAGES for n in numbers), f"Rank {rank} printed an image that is not there: {max(numbers or [0])}.")
    return numbers


@exercise("00.4", expects="a JobSpec(...)")
def describe_sixteen_gpus(answer):
    require(isinstance(answer, JobSpec), f"This is a {type(answer).__name__}; JobSpec(...) describes a job.")
    require("train" in answer.command, f"It runs another command: python {' '.join(answer.command)}.")
    require(answer.out == "runs/big", f"Its log would go to {answer.out}.")
    for problem in jobs.check(answer, "generic", ask_slurm=False):
        raise Wrong(f"Its file would be refused: {problem.message}.")
    require(answer.gpus_per_process == 1, f"Each process would have {answer.gpus_per_process} GPUs.")
    require(answer.world_size == 16, f"It would start {answer.world_size} processes.")
    limit = times.seconds(answer.time_limit)
    written = f"Slurm reads the time limit {answer.time_limit!r} as {limit // 60} minutes"
    require(limit == 7200, f"{written} and {limit % 60} seconds." if limit % 60 else f"{written}.")
    return "For other numbers of GPUs only two fields change; the command stays as it is."


@exercise("00.5", expects="a whole number")
def lines_of_a_log(answer):
    require(answer != 3, "This is the log of a file without srun: every line ran once.")
    require(answer != 18, "This is the log if every line of the file ran in each task; only srun starts tasks.")
    require(answer not in (5, 4), "This counts the tasks of one node or the nodes, but not all tasks of both nodes.")
    require(answer != 6, "These are the lines of the tasks alone; the file's own lines are missing.")
    require(answer == 8, f"{answer} lines do not come out: count how often each of the three lines runs.")
    return "What needs to happen once, such as making a folder, stands outside srun."


@exercise("00.6", expects="a whole number")
def cpus_of_two_gpus(answer):
    require(answer != 96, "These are all CPUs of a node: the job with the other two GPUs would get none.")
    require(answer != 24, "This is the share of one GPU.")
    require(answer in (48, 48.0), f"{answer} of 96 CPUs is not the share of two GPUs among four.")
    return "A job that takes more than its share leaves GPUs idle that nobody can use without CPUs."


@exercise("00.7", expects="a whole number")
def index_of_the_only_gpu(answer):
    missing = f"PyTorch would refuse cuda:{answer}"
    require(answer == 0, f"{missing}: it counts the GPUs that this process sees, and here this is one.")
    return "With --gres=gpu:4 all four tasks see all four GPUs, and there the local rank is the index."


@exercise("00.8", expects="a site file (TOML)")
def write_a_site_file(path):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ai.toml")
        file.write_text(path.read_text())
        try:
            site = load_site(str(file))
        except UserError as error:
            raise Wrong(f"It cannot be read: {error}.") from None
    spec = JobSpec(name="try", command=("-c", "pass"), out="runs/try", processes_per_node=2)
    lines = [line.partition(" # ")[0].strip() for line in render(spec, site).splitlines()]
    gpus = [line for line in lines if "gpu" in line and line.startswith("#SBATCH")]
    require(gpus, "A job of this site asks for no GPU at all.")
    require("#SBATCH --gpus-per-node=2" in gpus, f"Two processes ask for their GPUs by {gpus[0]!r}.")
    cpus = next(line for line in lines if "--cpus-per-task" in line)
    require(cpus.endswith("=8"), f"Two processes with one GPU each get {cpus!r}.")
    require(site.gpus_per_node == 8, f"A node has {site.gpus_per_node} GPUs in this file.")
    for name, value in {"partition": "ai", "account": "lab7"}.items():
        require(f"#SBATCH --{name}={value}" in lines, f"The job file of this site holds no --{name} of this cluster.")
    require(site.max_time, "A job of three days would be submitted, and Slurm would refuse it.")
    hours = times.seconds(site.max_time) / 3600
    require(hours == 24, f"Slurm reads {site.max_time!r} as {hours:g} hours.")
    return "Saved as slurm/sites/NAME.toml it serves every notebook; no line of code changes."


@exercise("00.9", expects="a job file")
def repair_a_job_file(path):
    how = _runs_on_four_ranks(path)
    return f"{how} Slurm had accepted the broken file without a word: read a log's first lines before you walk away."


@exercise("00.10", expects="a job file")
def write_a_job_file(path):
    how = _runs_on_four_ranks(path)
    script = Script(path.read_text())
    require(script.value("time"), "It has no time limit; Slurm then takes the partition's, often many hours.")
    limit = times.limit(script.value("time"))
    require(limit <= 300, f"Slurm would let it run for {limit // 60} minutes.")
    log = script.value("output")
    require(log, "It does not say where the log goes.")
    require(log.endswith("work/slurm-%j.out"), f"Its log would go to {log}.")
    return f"{how} You need no package to submit a job: a text file and sbatch are enough."


def _runs_on_four_ranks(path) -> str:
    """Require two nodes with two ranks and two GPUs each; return how that was found out."""
    printed = printed_by_job(path)
    if printed is None:
        _read_four_ranks(path.read_text())
        return READ
    lines = [line for line in printed if line.startswith("rank ")]
    require(lines, f"It ran, and no rank said who it is; it printed {'; '.join(printed) or 'nothing'}.")
    places, gpus = zip(*(line.split(", GPUs ") for line in lines), strict=True)
    wanted = [f"rank {rank} of 4: node {rank // 2}, local rank {rank % 2}" for rank in range(4)]
    require(list(places) == wanted, f"It ran, and printed: {'; '.join(places)}.")
    for node in (0, 1):
        seen = {gpu for names in gpus[2 * node : 2 * node + 2] for gpu in names.split(",")}
        require(len(seen) == 2 and "none" not in seen, f"The two ranks of node {node} see these GPUs: {sorted(seen)}.")
    return TRIED


def _read_four_ranks(text):
    """Where no Slurm can be started: require the words that start four ranks."""
    script = Script(text)
    commands = [line for line in text.replace("\\\n", " ").splitlines() if re.match(r"\s*srun\b", line)]
    require(commands, "Nothing in it starts tasks: the program would run once, on the first node.")
    program = any(re.search(r"\bmpdemo\.labs\.hello\b", line.partition(" #")[0]) for line in commands)
    require(program, "srun does not start mpdemo.labs.hello.")
    nodes, tasks = script.number("nodes"), script.number("ntasks-per-node")
    gpus = script.gpus_per_node(tasks)
    require(nodes == 2, f"The number of its nodes is {nodes}.")
    fixed = script.value("ntasks-per-node") or script.launcher == "torchrun"
    require(fixed, "It does not say how many tasks a node gets.")
    require(tasks == 2 or script.launcher == "torchrun", f"The number of tasks that it fixes for each node is {tasks}.")
    require(gpus, "It does not say how many GPUs it needs on each node.")
    require(gpus == 2, f"It asks for {gpus} GPUs on each node.")


@exercise("00.11", expects="a whole number")
def rows_of_metrics(answer):
    require(answer != 120, "This is the number if every process wrote its own lines into the file.")
    require(answer != 30, "The processes share the images of a step, and not the steps: each one does all of them.")
    require(answer == 60, f"{answer} lines do not fit: how many steps are there, and who writes?")
    return "All processes compute each step together, and one of them writes it down."


@exercise("00.12", expects="a function stop(out) that returns the job's last state")
def stop_a_job(answer):
    spec = JobSpec(name="exercise", command=("-c", "import time; time.sleep(60)"), out=ENDLESS)
    with contextlib.redirect_stdout(io.StringIO()):
        job = jobs.submit(spec, script=f"{ENDLESS}/job.sbatch", resubmit=True)
    try:
        returned = answer(ENDLESS)
        state = jobs.attach(ENDLESS).state
        require(state != "running", f"It returned {returned!r}, and the job is still running.")
        require(state == "cancelled", f"It returned {returned!r}, and the job is {state}.")
        require(returned == "cancelled", f"The job is cancelled, and the function returned {returned!r}.")
    finally:
        job.cancel()
        with contextlib.suppress(TimeoutError):  # a Slurm that is silent now is no fault of the answer
            job.wait(30, pending=30)
    return "It works from any notebook, also after a restart: all that it needs is the name of the run's folder."

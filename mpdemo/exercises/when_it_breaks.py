"""The checks of notebooks/10_when_it_breaks.ipynb: who is to blame, and repaired programs and job files."""

import re

from mpdemo.exercises import answers
from mpdemo.exercises import when_it_breaks_ranks as ranks
from mpdemo.exercises.check import exercise, require
from mpdemo.exercises.job_file import READ, TRIED, check_text, printed_by_job
from mpdemo.exercises.run import run_on_ranks
from mpdemo.jobs.check import Script

MEET = "mpdemo.labs.failures.meet"  # what the job file of 10.9 starts
NUMBER = r"[\"']?(\d+|\$\w+|\$\{[^}]*\})"
CPUS = re.compile(rf"(?<!\S)(?:-c ?|--cpus-per-task[= ]){NUMBER}")  # of srun
EXPORTED = re.compile(rf"\bSRUN_CPUS_PER_TASK={NUMBER}")
ALL_NODES = {  # values of MASTER_ADDR that are more than one name
    r"\$\{?SLURM_(?:JOB_)?NODELIST\}?": "the list of all nodes in Slurm's short form",
    r"(?:\$\(|`)\s*scontrol show hostnames?\b[^|)`]*[)`]": "the names of all nodes",
}


@exercise("10.1", expects="a whole number")
def who_is_to_blame(answer):
    require(answer in (0, 1, 2, 3), f"The log is of four ranks, 0 to 3; there is no rank {answer}.")
    require(answer != 2, "Rank 2 wrote first. But what does its message say: did it fail, or did it lose another?")
    require(answer != 0, "Rank 0 waited for something that never came. It can do nothing about that.")
    require(answer != 3, "Rank 3 lost its connection to a rank that had ended before.")
    return "One rank fails by itself, the others lose it: read the log for the error that speaks of no other rank."


@exercise("10.2", expects="a program that defines finish(loss, best, rank, world_size)")
def different_order(path):
    for rank, values in enumerate(run_on_ranks(path, ranks.drive_order)):
        require(len(values) == 2, f"Rank {rank} returns {len(values)} numbers instead of two.")
        mean, best = values
        require(mean != 3, f"Rank {rank} returns 3.0 for the losses 1 and 2: their sum.")
        require(mean == 1.5, f"Rank {rank} returns {mean} as the mean of the losses 1 and 2.")
        require(best == 0.25, f"Rank {rank} returns {best} as the best loss, and rank 0 knows 0.25.")
    return "An if on the rank may choose numbers. A collective below such an if is the usual deadlock."


@exercise("10.3", expects="a program that defines train(ddp, optimizer, batches)")
def uneven_inputs(path):
    results = run_on_ranks(path, ranks.drive_uneven)
    for rank, (result, batches) in enumerate(zip(results, ranks.BATCHES, strict=True)):
        used = f"Rank {rank} trained on {result['used']} of its {batches} batches."
        require(result["used"] == batches, used)
    first, second = (result["weights"] for result in results)
    require(first == second, "Both ranks used all their batches, and have different weights now.")
    return "Join lets the rank that is done answer the collectives of the others. Equal shares need no Join."


@exercise("10.4", expects="a program that defines wrap(model)")
def unused_parameters(path):
    for rank, right in enumerate(run_on_ranks(path, ranks.drive_heads)):
        for step, is_right in enumerate(right, 1):
            wrong = f"In step {step}, the gradients of rank {rank} are not the mean over both ranks."
            require(is_right, wrong)
    return "The search costs time in each step: where all parameters are always used, leave it out."


@exercise("10.5", expects="a program that defines repair(model)")
def norm_of_a_share(path):
    result = run_on_ranks(path, ranks.drive_norm)[0]
    require(result["training"], "The model is in evaluation mode: its batch norm no longer learns the statistics.")
    require(not result["batch"], "A batch norm is still there, and computes its mean from one rank's images.")
    require(result["norm"], "No layer normalises any more: it is another model, which trains worse.")
    require(result["weights"], "The other layers have new weights.")
    require(result["equal"], "The gradients on two ranks still differ from those of one device.")
    return "With group norm, DDP computes what one device computes, for any number of ranks."


@exercise("10.6", expects="two whole numbers, such as (64, 800)")
def per_device_batch(answer):
    images, steps = answer
    require(images != 64, "Each of the 8 processes loads 64 images, and the gradients of all are averaged.")
    require(images != 8, "Nobody divides the 64 of the script by 8: this is exactly what was forgotten.")
    require(images == 512, f"8 processes with 64 images each do not make {images}.")
    require(steps != 800, "800 steps have the 51,200 images on one device. Now a step uses up more of them.")
    require(steps == 100, f"{steps} steps of {images} images are {steps * images:,}; the epoch has 51,200.")
    return "An eighth of the steps with the same learning rate: it is another training, and nothing said so."


@exercise("10.7", expects='letters in one text, such as "ab"')
def which_pipelines_run(answer):
    letters = answers.letters_of(answer, "abcd")
    require("b" not in letters, "b: four stages and two microbatches. What do the other stages work on?")
    require("c" not in letters, "c: 30 images in 4 equal parts?")
    require("a" in letters, "a is missing: 32 images in 8 microbatches of 4, and 8 are more than 4 stages.")
    require("d" in letters, "d is missing: as many microbatches as stages is enough to run, if not to be fast.")
    return "The course's package refuses the others before a process starts; the library does, or fails in the loss."


@exercise("10.8", expects="a program that defines load(path)")
def load_safely(path):
    (result,) = run_on_ranks(path, ranks.drive_load, processes=1)
    require(not result["ran"], "A file from elsewhere called a function of its own while your program loaded it.")
    require(not result["error"], f"The file of weights and options cannot be loaded: {result['error']}.")
    require(result["good"], "The weights or the options of the file are lost.")
    require(result["refused"], "It returns something for a file with an object of an unknown class.")
    return "Allow one class by name, and nothing else. Better: save plain values, which need no permission."


@exercise("10.9", expects="a job file")
def repair_a_job_file(path):
    _read(check_text(path))
    printed = printed_by_job(path)
    if printed is not None:
        met = [line for line in printed if line.startswith("rank ")]
        require(len(met) == 2, f"It ran, and printed: {'; '.join(met or printed) or 'nothing'}.")
        require(all("of 2: met the others" in line for line in met), f"It ran, and printed: {'; '.join(met)}.")
    how = READ if printed is None else TRIED
    return f"{how} Three of the four mistakes gave no message that names them: check a job file before you submit it."


def _read(text):
    """Judge the text of the job file of 10.9: it is all that is known where no Slurm can be started."""
    script = Script(text)
    nodes, cpus = script.number("nodes"), script.number("cpus-per-task")
    tasks = nodes * script.number("ntasks-per-node")
    require((nodes, tasks, cpus) == (2, 2, 4), f"Slurm reads {nodes} nodes, {tasks} tasks, CPUs per task: {cpus}.")
    given = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "), flags=re.M)
    launch, program, _ = next((line for line in given.splitlines() if MEET in line), "").partition("python")
    require(program, "Nothing starts the program in which the ranks meet.")
    require(re.search(r"\bsrun\b", launch), "The program starts without srun: it is one process alone.")
    local = "localhost" in given or "127.0.0.1" in given
    require(not local, "On node 1, localhost is node 1: nobody listens there.")
    for value, what in ALL_NODES.items():
        assignment = re.search(rf"""\bMASTER_ADDR=["']?{value}["']?(?=\s|;|$)""", given)
        mended = assignment and re.search(r"\bMASTER_ADDR=|\bread\b.*\bMASTER_ADDR", given[assignment.end() :])
        require(not assignment or mended, f"MASTER_ADDR holds {what}: no machine has such a name.")
    step = CPUS.search(launch) or EXPORTED.search(given)
    require(step, "The job has 4 CPUs per task, but the step that srun starts has one, as in Slurm 22.05 to 23.02.")
    wrong = step[1].isdecimal() and int(step[1]) != cpus
    require(not wrong, f"The job has {cpus} CPUs per task, and the step that srun starts has {step[1]}.")

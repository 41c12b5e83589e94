"""Try a job file that should go on by itself after its time limit (exercise 09.11).

Where a Slurm can be started, the file runs: once training, it gets the warning, goes back into the queue and goes on.
"""

import re
import shutil
import time

from mpdemo.exercises import job_file
from mpdemo.exercises.answers import training_of
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.jobs import times
from mpdemo.jobs.check import Script
from mpdemo.jobs.record import read_text
from mpdemo.log import rows_in
from mpdemo.paths import root

OUT = "work/long"  # where the training of the exercise writes
SECONDS = 60.0  # limit for each of its two runs
OPERATOR = re.compile(r"\d?>>?&?\s*\S+|\|\||&&|[;|&]")  # ends a command: the training must not get it as an option
AGAIN = "A file that was broken in this way costs nothing on the first day: its mistake shows at the first time limit."


@exercise("09.11", expects="a job file")
def goes_on_by_itself(path) -> str:
    """Require that a job file asks for the warning, may be queued again, and goes on; return what follows."""
    _read(job_file.check_text(path))
    with job_file.trial(nodes=1) as place:
        if place:
            shutil.rmtree(root() / OUT, ignore_errors=True)
            _run(path, *place)
        return f"{job_file.TRIED if place else job_file.READ} {AGAIN}"


def _read(text):
    """Judge what no trial of some seconds can show: the warning's time, and the words that let the job go on."""
    words, settings = training_of(OPERATOR.sub("\n", text.replace("\\\n", " ")))
    require("srun" in words, "It no longer starts the training with srun.")
    require(settings.out == OUT, f"The training writes to {settings.out}, and no longer to {OUT}.")
    script = Script(text)
    signal = script.value("signal")
    require(signal, "At the time limit, Slurm kills the training without a warning.")
    require(not signal.startswith("B:"), f"With {signal} the warning goes to the script alone, not to the training.")
    name, _, before = signal.partition("@")
    require(name in ("USR1", "SIGUSR1", "10"), f"The training does not know the signal {name} as a warning.")
    require(before.isdecimal(), f"{signal} does not say how many seconds before the end the warning comes.")
    limit = times.limit(script.value("time") or "10-0")
    require(int(before) >= 10, f"{before} seconds may be too short to finish a step and write a checkpoint.")
    require(int(before) < limit, f"The warning would come {before} s before the end of a job of {limit} s.")
    require(script.value("requeue") != "no", "Slurm would refuse to put this job back into the queue.")
    again = [line for line in text.splitlines() if "scontrol requeue" in line and not line.lstrip().startswith("#")]
    require(again, "After the warning the job ends, and nothing puts it back into the queue.")
    require(settings.resume, "In the second run of the job the training would not go on from the checkpoint.")
    require(settings.resume == "auto", "In the first run of the job there is no checkpoint to resume from.")


def _run(path, environment, log):
    """Submit the file, warn the training, let it go on, and require each step once."""
    job = job_file.submit(path, environment, log, "--open-mode=append")
    _wait(environment, job, log, lambda answer: len(_steps()) >= 3, "train")
    job_file.client(environment, "scancel", "--signal=USR1", job)
    _wait(environment, job, log, lambda answer: answer.state == "pending", "go back into the queue")
    stopped = _steps()
    time.sleep(2)  # a node refuses a job that starts again within the second of its end
    job_file.client(environment, "scontrol", "update", f"jobid={job}", "StartTime=now")  # else it waits for two minutes
    _wait(environment, job, log, lambda answer: answer.state == "done", "end well in the second run of the job")
    steps = _steps()
    require(len(steps) > len(stopped), f"The second run of the job did no step after step {len(stopped)}.")
    require(steps == list(range(1, len(steps) + 1)), "Its file of metrics does not hold each step once.")


def _steps() -> list:
    return [row["step"] for row in rows_in(root() / OUT) if row["event"] == "step"]


def _wait(environment, job, log, condition, what):
    """Wait for a condition on Slurm's answer; refuse the file where the job ends before, or the time is over."""
    end = time.monotonic() + SECONDS
    while True:
        answer = job_file.ask(environment, job)
        if condition(answer):
            return
        if answer.state in ("pending", "running") and time.monotonic() < end:
            time.sleep(0.1)
            continue
        if answer.exit_status == 3:
            raise Wrong(
                "The training stopped with status 3, and then the job ended: it did not go back into the queue."
            )
        own = job_file.own_lines(read_text(log).splitlines())
        raise Wrong(f"The job is {answer.state} and did not {what}; its last line: {(own or ['(none)'])[-1][:120]}.")

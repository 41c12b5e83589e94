"""Check of notebook 10: a batch script that resumes by itself after its time limit.

Where a Slurm can be started, the script runs: once training, it is warned, goes back into the queue and resumes.
"""

import re
import shutil
import time

from checks.job_files import READ, TRIED, check_text, client, submit, training_of, trial, wait_for
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script
from mpdemo.paths import root
from mpdemo.training.log import rows_in

OUT = "work/long"  # where the run of the exercise writes
SECONDS = 60.0  # limit for each of its two runs
OPERATOR = re.compile(r"\d?>>?&?\s*\S+|\|\||&&|[;|&]")  # ends a command: the training must not get it as an option
AGAIN = "A script that is broken in this way costs nothing on the first day: it shows at the first time limit."


def check_09_7(path):
    read(check_text(path))
    with trial(nodes=1) as place:
        if place:
            shutil.rmtree(root() / OUT, ignore_errors=True)
            run(path, *place)
        return f"{TRIED if place else READ} {AGAIN}"


def read(text):
    """Judge what no trial of some seconds can show: the warning's time, and the words that let the job resume."""
    words, settings = training_of(OPERATOR.sub("\n", text.replace("\\\n", " ")))
    assert "srun" in words, "It no longer starts the training with srun."
    assert settings.out == OUT, f"The run writes to {settings.out}, and no longer to {OUT}."
    script = Script(text)
    signal = script.value("signal")
    assert signal, "At the time limit, Slurm kills the run without a warning."
    assert not signal.startswith("B:"), f"With {signal} only the script is warned, not the training."
    name, _, before = signal.partition("@")
    assert name in ("USR1", "SIGUSR1", "10"), f"The training doesn't know the signal {name} as a warning."
    assert before.isdecimal(), f"{signal} doesn't say how many seconds before the end the warning comes."
    limit = slurm.limit(script.value("time") or "10-0")
    assert 10 <= int(before) < limit, f"A warning {before} s before the end: allowed are 10 to {limit - 1} s."
    assert "no-requeue" not in script.options, "Slurm would refuse to put this job back into the queue."
    again = [line for line in text.splitlines() if re.match(r"[^#]*scontrol requeue", line)]
    assert again, "After the warning the job ends, and nothing puts it back into the queue."
    assert settings.resume == "auto", "Only --resume auto fits both runs: the first one finds no checkpoint yet."


def run(path, environment, log):
    """Submit the script, warn the training, let it resume, and require each step once."""
    job = submit(path, environment, log, "--open-mode=append")
    place = job, environment, log
    wait_for(*place, lambda state: len(steps()) >= 3, "train", SECONDS)
    client(environment, "scancel", "--signal=USR1", job)
    wait_for(*place, lambda state: state == "pending", "go back into the queue", SECONDS)
    stopped = len(steps())
    time.sleep(2)  # a node refuses a job that starts again within the second of its end
    client(environment, "scontrol", "update", f"jobid={job}", "StartTime=now")  # else it waits for two minutes
    wait_for(*place, lambda state: state == "completed", "end well in its second run", SECONDS)
    done = steps()
    assert len(done) > stopped, f"The job's second run did no step after step {stopped}."
    assert done == list(range(1, len(done) + 1)), "Its file of metrics doesn't hold each step once."


def steps():
    return [row["step"] for row in rows_in(root() / OUT) if row["event"] == "step"]

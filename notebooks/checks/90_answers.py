"""Checks of notebook 90: what failures cost on so many GPUs, and a batch script that requeues its own job and resumes.

Where a Slurm can be started, the script runs: once training, its shell is warned, and the job goes back and resumes.
"""

import math
import re
import shutil

from checks import requeues
from checks.job_files import READ, TRIED, check_text, lines_of, run_again, submit, trial, wait_for, warn
from mpdemo.paths import root

COMMAND = "work/long.py work/long"  # what the exercise trains: a slowed copy of a script to take home
EPOCHS, STEPS = 3, 24  # of the copy, and of an epoch
SECONDS = 60.0  # limit for each of its two runs
AGAIN = (
    "A script that is broken in this way costs nothing on the first day: it shows at the first time limit."
)


DAYS, GPUS, FAILURES = 54, 16_384, 419  # of Llama 3's training
JOBS = (16_384, 60, 300), (1_024, 60, 600), (64, 60, 3_600)  # GPUs, s of a save, s of a restart


def priced(gpus, cost, restart, between=1.0, power=1, two=2.0, work=0.5, again=1.0):
    """Return interval (s) and the fraction lost; the other words are the ways in which an answer may go wrong."""
    mean = between * DAYS * 86_400 / FAILURES * (GPUS / gpus) ** power
    interval = math.sqrt(two * cost * mean)
    return interval, cost / interval + work * interval / mean + again * restart / mean


MISTAKES = [  # what was done, and the message
    ({"between": GPUS**-1}, "takes the whole cluster's time between failures for one GPU's"),
    ({"between": 3600**-1}, "counts the time between failures in hours, and a save in seconds"),
    ({"power": 0}, "gives the interval of Llama 3's 16,384 GPUs. Fewer GPUs fail less often"),
    ({"power": -1}, "lets fewer GPUs fail more often, not less"),
    ({"two": 1.0}, "leaves out the 2 under the root"),
    ({"work": 1.0}, "loses a whole interval in each failure; on average it is half of one"),
    ({"work": 0.0}, "leaves out the work that is done again"),
    ({"again": 0.0}, "leaves out the restarts"),
]


def check_90_3(plan):
    for job in JOBS:
        (interval, lost), right = plan(*job), priced(*job)
        said = f"For {job[0]:,} GPUs, saves of {job[1]} s and restarts of {job[2]} s, plan"
        for words, what in MISTAKES:
            wrong = priced(*job, **words)
            near = [math.isclose(a, b, rel_tol=0.03) for a, b in zip((interval, lost), wrong, strict=True)]
            assert wrong == right or not all(near), f"{said} {what}."
        assert math.isclose(interval, right[0], rel_tol=0.06), (
            f"{said} saves every {interval:.0f} s, not {right[0]:.0f}."
        )
        assert math.isclose(lost, right[1], rel_tol=0.1), (
            f"{said} loses {lost:.2%} of the time, not {right[1]:.2%}."
        )
    lost = [f"{plan(*job)[1]:.1%} on {job[0]:,} GPUs (restarts of {job[2]} s)" for job in JOBS[:2]]
    return f"With saves of 60 s, your second number is {' and '.join(lost)}."


def check_90_5(path):
    text = check_text(path)
    started = re.search(rf"^\s*srun .*torchrun .*{COMMAND}", text.replace("\\\n", " "), re.M)
    assert started, f"srun no longer runs torchrun {COMMAND}."
    to_script = requeues.read(text)
    requeues.require_progress(path, to_script, "work/long-{}.pt")
    write_training(root() / "work")
    with trial(nodes=1) as place:
        if place:
            run(path, to_script, *place)
    return f"{TRIED if place else READ} {AGAIN}"


def write_training(folder):
    """Write the training of the exercise, and remove what an earlier one saved."""
    scripts = root() / "notebooks" / "scripts"
    text, step = (scripts / "train_ddp.py").read_text(), "        optimizer.step()\n"
    slow = {"WORKERS = 5": f"WORKERS = {EPOCHS}", step: f"{step}        time.sleep(0.1)\n"}
    # so it saves at its end, or when it is warned
    slow["SAVE_MINUTES = 60"] = f"SAVE_MINUTES = {EPOCHS * STEPS}"
    for old, new in slow.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "long.py").write_text(text)
    shutil.copy(scripts / "digits.npz", folder)
    for file in folder.glob("long-*.pt"):
        file.unlink()


def run(path, to_script, environment, log):
    """Submit the script, warn it, let the job resume, and require each epoch once."""
    job = submit(path, environment, log, "--open-mode=append")
    place = job, environment, log
    wait_for(*place, lambda state: epochs(log), "train", SECONDS)
    warn(place, to_script)
    wait_for(*place, lambda state: state == "pending", "go back into the queue", SECONDS)
    stopped = steps_done()
    assert stopped, "The training didn't get the warning: the job requeued itself, and nothing was saved."
    unheard = "The training didn't get the warning: it trained to its end, and the job requeued itself."
    assert stopped < EPOCHS * STEPS, unheard
    run_again(*place, SECONDS)
    done = epochs(log)
    assert done == list(range(1, EPOCHS + 1)), f"Its log has the epochs {done}, and not each once."


def epochs(log):
    return [int(number) for line in lines_of(log) for number in re.findall(r"epoch (\d+): loss", line)]


def steps_done():
    """Return after how many steps the newest checkpoint was saved, 0 without any."""
    return max(
        (int(file.stem.partition("-")[2]) for file in (root() / "work").glob("long-*.pt")), default=0
    )

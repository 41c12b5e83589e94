"""Check of notebook 53: a batch script that requeues its own job and resumes.

Where a Slurm can be started, the script runs: once training, its shell is warned, and the job goes back and resumes.
"""

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


def check_53_1(path):
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

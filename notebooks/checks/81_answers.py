"""Checks of notebook 81: the reader's script resumes and stops together, and its batch script brings it back.

The batch script runs on a throw-away Slurm where one can be started (own_job.py).
"""

import signal
import tempfile
from itertools import pairwise

from checks import own_job, requeues
from checks.job_files import READ, TRIED, check_text, trial
from checks.own_job import files_of, filled, knows_usr1, losses_at
from checks.own_runs import judged, run
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script

UPSET = 5  # after this step other random numbers follow, as in a run that resumes there
SAVES = 5  # the script looks for a warning every so many steps
TOGETHER = 60.0  # s, the limit for a run of which one rank is warned


def check_81_1(script):
    (_, (alone,)), (_, two) = run(script, 1), run(script, 2, upset=UPSET)
    whole, both = (
        alone["rows"],
        [sorted(a + b) for a, b in zip(*(seen["rows"] for seen in two), strict=True)],
    )
    assert len(whole) == len(both), (
        f"It makes {len(whole)} steps with one process and {len(both)} with two."
    )
    for step, (before, after) in enumerate(pairwise(whole), 1):
        same = f"Steps {step} and {step + 1} train on the same rows: the seed must change with the step."
        assert before != after, same
    off = next((step for step, rows in enumerate(both, 1) if rows != whole[step - 1]), None)
    ranks = f"In step {off} two processes train on other rows than one. Do 80.2 first: all ranks draw"
    assert off is None or off > UPSET, f"{ranks} the whole batch, so all need the same seed."
    drawn = f"We drew other random numbers after step {UPSET}, and step {off} then trains on other rows"
    assert off is None, (
        f"{drawn}. So would a resumed run: seed anew in each step, before the batch is drawn."
    )


def check_81_2(script):
    judged(script, "--resume", "--processes=1,2")


def check_81_3(script):
    assert knows_usr1(script), "It doesn't know SIGUSR1, which Slurm sends before the time limit."
    begin = 0
    with tempfile.TemporaryDirectory(prefix="mpdemo-own-") as name:
        folder = filled(name, files_of(script))
        for rank, number, after in ((1, signal.SIGUSR1, 7), (0, signal.SIGTERM, 2)):
            begin = stopped(script, folder, begin, [rank, int(number), after])
        steps = run(script, 2, place=folder)[1][0]["steps"]
    again = (
        f"Stopped after step {begin}, it makes {steps} more: the next run doesn't begin where it stopped."
    )
    assert begin + steps == run(script, 1)[1][0]["steps"], again


def stopped(script, folder, begin, warn):
    """Warn one of two ranks; return the step after which all have saved and ended."""
    rank, number, after = warn
    sent = f"{signal.Signals(number).name} reached rank {rank} alone, in step {begin + after}"
    try:
        steps = [seen["steps"] for seen in run(script, 2, place=folder, seconds=TOGETHER, warn=warn)[1]]
    except AssertionError as error:
        raise AssertionError(f"{sent}. {error}") from None
    assert len(set(steps)) == 1, f"{sent}: rank 0 made {steps[0]} steps and rank 1 {steps[1]}."
    end, most = begin + steps[0], begin + after + SAVES
    assert end <= most, (
        f"{sent}, and both trained on to step {end}: all should end at most {SAVES} steps later."
    )
    saved = f"{sent}, and both ended after step {end}, but left no bard-{end}."
    assert (folder / f"bard-{end}").exists(), saved
    return end


WARNING = 600  # s before the limit that Slurm must warn, for a save of the large run
WARNED = "The warning reaches the ranks, and they have the time to save."
AGAIN = "What it submits stops in time, saves, and resumes with the same losses, however often its time limit comes."


def check_81_4(path):
    to_script, (script, whose) = requeues.passed_on(submitted(path), WARNING), own_job.own_training()
    with trial(nodes=1) as place:
        if not place:
            return f"{READ} {WARNED}"
        own_job.saved_in_time(path, to_script, script, *place)
    return f"{TRIED} It trained with {whose}. {WARNED}"


def check_81_5(path):
    text = submitted(path)
    to_script, (script, whose) = requeues.read(text, WARNING), own_job.own_training()
    batch = Script(text)
    assert "requeue" in batch.options, "Without --requeue, some sites put no job back into the queue."
    assert batch.value("open-mode") == "append", "Each start would empty the log."
    requeues.require_progress(path, to_script, "bard-{}/.metadata")
    with trial(nodes=1) as place:
        if not place:
            return f"{READ} {AGAIN}"
        whole = (
            losses_at(run(script, 1)[0]) if script else {step: 5 - step / 10 for step in (5, 10, 15, 20)}
        )
        assert whole, "bard.py prints no step with its loss."
        own_job.tried(path, to_script, script, whole, *place)
    return f"{TRIED} It trained with {whose}. {AGAIN}"


def submitted(path):
    """Return the text of a batch script that trains what was asked for, as long as the partition allows."""
    text = check_text(path)
    for word in ("--size wanted", "--bf16"):
        assert word in text, f"It trains without {word}, so not at the size that was wanted."
    limit = slurm.limit(Script(text).value("time") or "10-0")
    assert limit <= 86_400, f"The time limit is {limit:.0f} s; the partition allows a day."
    return text

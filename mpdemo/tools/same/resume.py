"""Stops the reader's script twice in a row, starts it again by the same command, and follows each resume.

Some scripts resume once and not a second time, since what they save after a resume counts from the resume.
"""

import functools
import re
import shutil
import signal

from mpdemo.tools.same import inside, shares
from mpdemo.tools.same.finding import EQUAL, Finding, apart, distance, parted
from mpdemo.tools.same.worlds import refuse

EPOCHS = 3
# of ARGS, and its value
FLAG = re.compile(r"(?i)\0-[-\w]*(resume|continue|restart|restore)[-\w]*(=[^\0]*|\0[^-\0][^\0]*)?")
LONGER = 32  # times as many batches at most, where no checkpoint is written in the usual ones
FEW = 2  # steps that tell with which weights a run begins


def verdict(watcher, processes, other) -> dict:
    """Return what two stops by SIGKILL and two by SIGTERM change, and whether another number of processes resumes."""
    run, whole = uninterrupted(watcher, processes)
    killed = StoppedTwice(run, whole, signal.SIGKILL)
    series, notes = [killed], []
    if not whole.ranks[0].of("start")[0]["handler"]:
        notes.append(
            "the script does not handle SIGTERM: judged by the resumes from its last checkpoints alone"
        )
    elif killed.places:
        series.append(StoppedTwice(run, whole, signal.SIGTERM))
    rows = {"resumes with the weights of step": ["first", "second"]}
    rows |= {stopped.number.name: [*stopped.places, "-"][:2] for stopped in series if stopped.places}
    first, second = (sum((stopped.found[k] for stopped in series), []) for k in range(2))
    if watcher.begin != watcher.args.script:
        notes.append("the first run is made without the flag that resumes, as there is no checkpoint yet")
    if other != processes and any(killed.places[:1]):
        elsewhere = run(other, folder=killed.copy, stop=(signal.SIGKILL, FEW), epochs=1)
        rows[f"with {elsewhere}"] = [place_of(whole, elsewhere), ""]
        if not place_of(whole, elsewhere):
            error = "" if elsewhere.steps else elsewhere.error
            what = f"{elsewhere} cannot resume: {error or 'begins with other weights'}"
            first.append(Finding("another world size not readable", what, elsewhere.error_line))
    found = {}
    for finding in first + second:
        found.setdefault(finding.name, finding)
    record = {"processes": processes, "table": rows} | parted(list(found.values()), watcher.args.strict)
    notes += sum((stopped.notes for stopped in series), [])
    if second and not first:
        notes.append("it resumes once as it should, and not a second time")
    return record | {"verdict": "different" if record["findings"] else "same", "notes": notes}


def uninterrupted(watcher, processes) -> tuple:
    """Run the script to its end; return how to run it again as long, and that run."""
    run, usual = functools.partial(watcher.run, without=watcher.args.without), watcher.args.batches
    again = functools.partial(watcher.run_new, processes, without=watcher.args.without, epochs=EPOCHS)
    whole, first = again(), FLAG.sub("", "\0".join(watcher.args.script)).split("\0")
    if first != watcher.begin and (watcher.needed or not whole.steps):  # no checkpoint is there yet
        watcher.begin, watcher.needed = first, set()
        whole = again()
    refuse(whole)
    # many save every some hundred steps only: run until one would have saved twice
    if not whole.has_saved:
        run = functools.partial(run, batches=LONGER * usual)
        refuse(whole := again(batches=LONGER * usual, beyond=2 * usual))
    return run, whole


class StoppedTwice:
    """A run that a signal stops, its first resume, which the same signal stops, and its second, which runs on."""

    def __init__(self, run, whole, number):
        self.whole, self.number, self.run = whole, number, functools.partial(run, whole.processes)
        self.places = []  # after which steps of the uninterrupted run the resumes begin
        self.found, self.notes, self.copy = ([], []), [], None  # what is found in each resume
        stop = first_stop(whole)
        stopped = self.run(stop=(number, stop), epochs=EPOCHS)
        if stopped.has_saved:
            self.notes.append(f"stopped by {number.name} after step {stop}")
            self.copy = shutil.copytree(stopped.folder, f"{stopped.folder}-copy", symlinks=True)
            self.resume(stopped, stop)
        elif number == signal.SIGKILL:
            self.found[0].append(Finding("no checkpoint", f"none was written in {stop} steps"))

    def resume(self, stopped, stop):
        """Resume, and where all is right so far, stop and resume again."""
        done, name, total = len(stopped.steps), self.number.name, len(self.whole.steps)
        warned = self.number == signal.SIGTERM
        more = second_stop(self.whole, warned, stop, done)
        again = self.run(folder=stopped.folder, stop=(self.number, more), epochs=EPOCHS)
        if not self.is_right(stopped, again):
            return
        begin = self.places[0]
        end = begin + len(again.steps)
        if warned and begin < done:
            self.notes.append(f"SIGTERM saves nothing: {done - begin} steps are lost")
        if len(again.steps) < more and again.error:
            what = f"in the first resume after {name}, {again.error}"
            self.found[0].append(Finding("fails on resume", what, again.error_line))
            return
        if len(again.steps) < more or end >= total:
            self.notes.append(f"{name} comes too late to stop it a second time")
            return
        self.notes[0] += f", and again after step {end}"
        most = min(stop, total - begin) + 1  # more can't be compared
        if not self.is_right(again, self.run(folder=stopped.folder, stop=(signal.SIGKILL, most), epochs=1)):
            return
        kept = self.places[1]
        # the first run has left a checkpoint in as many steps
        if (kept < end and begin == done) if warned else (kept == begin and more >= stop):
            what = f"the first resume leaves none when {name} stops it after step {end}"
            what += f": the second begins with the weights of step {kept}"
            self.found[1].append(Finding("no checkpoint", what))

    def is_right(self, stopped, again) -> bool:
        """Whether a resumed run continues like the uninterrupted one; note where it begins, and what is found in it."""
        nth = ("first", "second")[len(self.places)]
        found = self.found[len(self.places)]
        if self.number == signal.SIGTERM and stopped.how == "silent":
            found.append(Finding("hangs", f"after the {nth} SIGTERM"))
        if difference := follow(self.whole, again):
            loads = again.ranks[0].first("load at")
            difference.where = loads if again.steps and loads else difference.where or loads
            difference.what = f"in the {nth} resume after {self.number.name}, {difference.what}"
            found.append(difference)
        self.places.append(place_of(self.whole, again))
        return not found


def steps_of_epoch(whole) -> int:
    """Return how many steps the first epoch has."""
    return sum(ranks[0]["number"] == whole.steps[0][0]["number"] for ranks in whole.steps)


def first_stop(whole) -> int:
    """Return the step after which the run is stopped: in the middle of its second epoch, where there is one."""
    epoch, total = steps_of_epoch(whole), len(whole.steps)
    return max(1, min(epoch + max(1, epoch // 2), total - 1) if epoch < total else 2 * total // 3)


def second_stop(whole, warned, stop, done) -> int:
    """Return after how many steps the first resume is stopped, so that some steps are left for the second.

    Where the last checkpoint is unknown, as many as the first run had: it has written one in them.
    """
    total, epoch = len(whole.steps), steps_of_epoch(whole)
    if not warned:
        return max(1, min(stop, total - stop))
    return max(1, min(stop, epoch, total - 1 - done) if epoch < total else min(stop, (total - done) // 2))


def place_of(whole, again) -> int | None:
    """Return after how many steps of the uninterrupted run its weights are those with which the other one begins."""
    start = again.sums[0]["weights"] if again.steps else {}
    places = (k for k, sums in enumerate(whole.sums) if start and apart(sums["weights"], start)[0] <= EQUAL)
    return next(places, None)


def follow(whole, again) -> Finding | None:
    """Return the first difference of a resumed run from the uninterrupted one."""
    if not again.steps:
        return Finding("fails on resume", again.error or "no step is seen", again.error_line)
    place, expected, drawn = place_of(whole, again), whole.in_samples, again.in_samples
    first = expected.index(drawn[0]) if drawn and drawn[0] in expected else None
    if not place:
        name = "weights not restored" if first or place is None else "does not resume"
        start = "no step" if place is None else "the start"
        return Finding(name, f"the first weights are those of {start}")
    if first != place and place < len(expected) and drawn:
        what = f"the weights are those of {place} steps, the samples those of"
        if first is None:
            return Finding("another order after resume", f"{what} no step of the uninterrupted run")
        return Finding("order restarts" if first < place else "step skipped", f"{what} step {first + 1}")
    both = range(min(len(whole.steps) - place, len(again.steps)))
    found = next(filter(None, (in_step(whole, again, place, k) for k in both)), None)
    files = inside.of_saved(whole, again, place, "file differs after resume")
    return found or next(files, None) or printed(whole, again, place)


def in_step(whole, again, place, k) -> Finding | None:
    """Return the first difference of a resume's step `k`, which is step `place` + `k` of the uninterrupted run."""
    expected, drawn, chance = whole.in_samples, again.in_samples, again.names("chance")
    numbered = place + k < len(expected)
    rows = (expected[place + k], drawn[k]) if numbered else (whole.in_rows[place + k], again.in_rows[k])
    rates = whole.steps[place + k][0]["rates"], again.steps[k][0]["rates"]
    sums, where = (whole.sums[place + k], again.sums[k]), f"in step {place + k + 1}"
    if rows[0] != rows[1] and (numbered or all(rows) and not chance):
        found = "another order after resume", f"other rows are trained on {where}"
    elif apart(*(world["weights"] for world in sums))[0] > EQUAL:  # the last step has changed them
        found = "optimizer not restored", f"the weights differ {where}"
    elif any(distance(*pair) > EQUAL for pair in zip(*rates, strict=False)):
        name = "scheduler not restored" if k else "learning rate not restored"
        found = name, f"the learning rate is {rates[1]} instead of {rates[0]} {where}"
    elif lost := inside.lost(whole, again, place, k):
        return lost
    else:
        off, name = apart(*(world["gradients"] for world in sums))
        if not off > EQUAL:
            return None
        what = f"the gradient of {name} differs {where}"
        found = "random state not restored" if chance else "state not restored", what
        for a, b, lines in (pair for kind in chance for pair in shares.alike(again, kind)):
            same = f"{what}; rank {a} and rank {b} draw the same ({lines[0]})"
            found = "random state of another rank", same
    return Finding(*found, again.steps[k][0]["where"])


def printed(whole, again, place):
    """Return the first loss that is printed after a resume, and never in the uninterrupted run."""
    expected, losses = whole.ranks[0].printed(), again.ranks[0].printed()
    # of later steps the other run has printed nothing
    both = min(len(again.steps), len(whole.steps) - place)
    for name, value, half in losses[: len(losses) * both // len(again.steps)] if expected else ():
        if not any(name == other and abs(value - known) <= 2 * half for other, known, _ in expected):
            what = f"{name} {value:g} is printed, and never in the uninterrupted run"
            return Finding("printed loss differs", what)
    return None

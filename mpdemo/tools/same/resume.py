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
    series, notes, rows = [killed], [], {"resumes with the weights of step": ["first", "second"]}
    if not whole.ranks[0].of("start")[0]["handler"]:
        notes.append(
            "the script does not handle SIGTERM: judged by the resumes from its last checkpoints alone"
        )
    elif killed.places:
        series.append(StoppedTwice(run, whole, signal.SIGTERM))
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
    # each name once
    found = list({finding.name: finding for finding in reversed(first + second)}.values())[::-1]
    record = {"processes": processes, "table": rows} | parted(found, watcher.args.strict)
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
    if not whole.names("checkpoint"):
        run = functools.partial(run, batches=LONGER * usual)
        refuse(whole := again(batches=LONGER * usual, beyond=2 * usual))
    return run, whole


class StoppedTwice:
    """A run that a signal stops, its first resume, which the same signal stops, and its second, which runs on."""

    def __init__(self, run, whole, number):
        self.whole, self.number, self.stop = whole, number, first_stop(whole)
        self.places = []  # after which steps of the uninterrupted run the resumes begin
        self.found, self.notes, self.copy = ([], []), [], None  # what is found in each resume
        self.run = functools.partial(run, whole.processes)
        stopped = self.run(stop=(number, self.stop), epochs=EPOCHS)
        if not stopped.names("checkpoint"):
            if number == signal.SIGKILL:
                self.found[0].append(Finding("no checkpoint", f"none was written in {self.stop} steps"))
            return
        self.notes.append(f"stopped by {number.name} after step {self.stop}")
        self.copy = shutil.copytree(stopped.folder, f"{stopped.folder}-copy", symlinks=True)
        self.resume(stopped)

    def resume(self, stopped):
        """Resume, and where all is right so far, stop and resume again."""
        done, name = len(stopped.steps), self.number.name
        more = second_stop(self.whole, self.number, self.stop, done)
        again = self.run(folder=stopped.folder, stop=(self.number, more), epochs=EPOCHS)
        if not self.is_right(stopped, again):
            return
        begin = self.places[0]
        end = begin + len(again.steps)
        if self.number == signal.SIGTERM and begin < done:
            self.notes.append(f"SIGTERM saves nothing: {done - begin} steps are lost")
        if len(again.steps) < more and again.error:
            self.found[0].append(
                Finding(
                    "fails on resume", f"in the first resume after {name}, {again.error}", again.error_line
                )
            )
        elif len(again.steps) < more or end >= len(self.whole.steps):
            self.notes.append(f"{name} comes too late to stop it a second time")
        else:
            self.notes[0] += f", and again after step {end}"
            most = min(self.stop, len(self.whole.steps) - begin) + 1  # more can't be compared
            if self.is_right(again, self.run(folder=stopped.folder, stop=(signal.SIGKILL, most), epochs=1)):
                self.progress(saves=begin == done, end=end, long=more >= self.stop)

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

    def progress(self, saves, end, long):
        """Note whether the first resume leaves no checkpoint, although the first run has left one in as many steps."""
        begin, kept = self.places
        if (kept < end and saves) if self.number == signal.SIGTERM else (kept == begin and long):
            what = f"the first resume leaves none when {self.number.name} stops it after step {end}"
            self.found[1].append(
                Finding("no checkpoint", f"{what}: the second begins with the weights of step {kept}")
            )


def steps_of_epoch(whole) -> int:
    """Return how many steps the first epoch has."""
    return sum(ranks[0]["number"] == whole.steps[0][0]["number"] for ranks in whole.steps)


def first_stop(whole) -> int:
    """Return the step after which the run is stopped: in the middle of its second epoch, where there is one."""
    epoch, total = steps_of_epoch(whole), len(whole.steps)
    return max(1, min(epoch + max(1, epoch // 2), total - 1) if epoch < total else 2 * total // 3)


def second_stop(whole, number, stop, done) -> int:
    """Return after how many steps the first resume is stopped, so that some steps are left for the second.

    Where the last checkpoint is unknown, as many as the first run had: it has written one in them.
    """
    total, epoch = len(whole.steps), steps_of_epoch(whole)
    if number == signal.SIGKILL:
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
        return Finding(*wrong_start(whole, place, first))
    both = range(min(len(whole.steps) - place, len(again.steps)))
    found = next(filter(None, (in_step(whole, again, place, k) for k in both)), None)
    files = inside.of_saved(whole, again, place, "file differs after resume")
    return found or next(files, None) or printed(whole, again, place)


def in_step(whole, again, place, k) -> Finding | None:
    """Return the first difference of a resume's step `k`, which is step `place` + `k` of the uninterrupted run."""
    expected, drawn = whole.in_samples, again.in_samples
    rates = whole.steps[place + k][0]["rates"], again.steps[k][0]["rates"]
    where, line = f"in step {place + k + 1}", again.steps[k][0]["where"]
    if place + k < len(expected) and expected[place + k] != drawn[k]:
        return Finding("another order after resume", f"other samples are drawn {where}", line)
    rows = whole.in_rows[place + k], again.in_rows[k]
    if place + k >= len(expected) and rows[0] != rows[1] and all(rows) and not again.names("chance"):
        return Finding("another order after resume", f"other rows enter the model {where}", line)
    sums = whole.sums[place + k], again.sums[k]
    # the last step has changed them in another way
    if apart(sums[0]["weights"], sums[1]["weights"])[0] > EQUAL:
        return Finding("optimizer not restored", f"the weights differ {where}", line)
    if any(distance(*pair) > EQUAL for pair in zip(*rates, strict=False)):
        what = f"the learning rate is {rates[1]} instead of {rates[0]} {where}"
        return Finding("scheduler not restored" if k else "learning rate not restored", what, line)
    if found := inside.lost(whole, again, place, k):
        return found
    off, name = apart(sums[0]["gradients"], sums[1]["gradients"])
    if off > EQUAL:
        what = f"the gradient of {name} differs {where}"
        for a, b, lines in (pair for kind in again.names("chance") for pair in shares.alike(again, kind)):
            what += f"; rank {a} and rank {b} draw the same ({lines[0]})"
            return Finding("random state of another rank", what, line)
        chance = "random state not restored" if again.names("chance") else "state not restored"
        return Finding(chance, what, line)
    return None


def wrong_start(whole, place, first) -> tuple:
    """Name the difference where the first step has the samples of another step than its weights say."""
    where = f"the weights are those of {place} steps, the samples those of"
    if first is None:
        return "another order after resume", f"{where} no step of the uninterrupted run"
    if first == place - 1 and whole.steps[first][0]["taken"] != whole.steps[0][0]["taken"]:
        return "step counted twice", f"{where} step {first + 1}"
    return "order restarts" if first < place else "step skipped", f"{where} step {first + 1}"


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

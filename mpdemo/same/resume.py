"""Stops the reader's script, starts it again by the same command, and follows it beside an uninterrupted run."""

import shutil
import signal

from mpdemo.same.compare import Finding, apart, distance
from mpdemo.same.worlds import refuse

EPOCHS = 3
EQUAL = 1e-5  # relative: a resume in the same world repeats the same arithmetic


def verdict(watcher, processes, other) -> dict:
    """Return what a stop by SIGTERM and one by SIGKILL change, and whether another number of processes can go on."""
    options = {"without": watcher.args.without, "epochs": EPOCHS}
    whole = watcher.run_new(processes, **options)
    refuse(whole)
    steps = sum(ranks[0]["number"] == whole.steps[0][0]["number"] for ranks in whole.steps)  # of the first epoch
    half, last = max(1, steps // 2), len(whole.steps) - 1
    stop = min(steps + half, last) if steps <= last else half  # some look for a signal only every few steps
    findings, notes, rows = [], [f"stopped after step {stop}"], {"": ["resumes with the weights of step"]}
    signals = [signal.SIGKILL, signal.SIGTERM]
    if not whole.ranks[0].of("start")[0]["handler"]:
        notes.append("the script does not handle SIGTERM: judged by the resume from its last checkpoint alone")
        signals.pop()
    for number in signals:
        stopped = watcher.run(processes, stop=(number, stop), **options)
        if number == signal.SIGKILL and not stopped.names("file"):
            findings.append(Finding("no checkpoint", f"none was written in {stop} steps"))
            break
        if number == signal.SIGTERM and stopped.how == "silent":
            findings.append(Finding("hangs", "after SIGTERM"))
        if number == signal.SIGKILL:
            copy = shutil.copytree(stopped.folder, f"{stopped.folder}-copy", symlinks=True)
        again = watcher.run(processes, folder=stopped.folder, **options)
        found = follow(whole, again, number.name)
        if found and found.name not in {finding.name for finding in findings}:
            findings.append(found)
        rows[number.name] = [place_of(whole, again)]
    if other != processes and rows.get("SIGKILL", [0])[0]:
        elsewhere = watcher.run(other, folder=copy, **options)
        place = place_of(whole, elsewhere)
        rows[f"with {elsewhere}"] = [place]
        if not place:
            what = f"{elsewhere} cannot go on: {elsewhere.error or 'begins with other weights'}"
            findings.append(Finding("another world size not readable", what))
    said = "does NOT resume as it should" if findings else "resumes as if it had never stopped"
    kind = "not the same" if findings else "same"
    record = {"processes": processes, "verdict": kind, "said": said, "findings": findings, "harmless": []}
    return record | {"notes": notes, "table": rows}


def place_of(whole, again) -> int | None:
    """Return after how many steps of the uninterrupted run its weights are those with which the other one begins."""
    start = again.sums[0]["weights"] if again.steps else {}
    places = (k for k, sums in enumerate(whole.sums) if start and apart(sums["weights"], start)[0] <= EQUAL)
    return next(places, None)


def follow(whole, again, after) -> Finding | None:
    """Return the first difference of a resumed run from the uninterrupted one."""
    if not again.steps:
        return Finding("fails on resume", f"after {after}: {again.error or 'no step seen'}")
    place, expected, drawn = place_of(whole, again), whole.in_samples, again.in_samples
    first = expected.index(drawn[0]) if drawn and drawn[0] in expected else None
    if not place:
        name = "weights not restored" if first or place is None else "does not resume"
        start = "no step" if place is None else "the start"
        return Finding(name, f"after {after} its first weights are those of {start}")
    if first != place and place < len(expected) and drawn:
        return Finding(*wrong_start(whole, place, first, after))
    for k, (a, b) in enumerate(zip(whole.steps[place:], again.steps, strict=False)):
        where = f"after {after}, in step {place + k + 1}"
        if place + k < len(expected) and expected[place + k] != drawn[k]:
            return Finding("another order after resume", f"{where} other samples are drawn")
        rates = any(distance(*pair) > EQUAL for pair in zip(a[0]["rates"], b[0]["rates"], strict=False))
        sums = whole.sums[place + k], again.sums[k]
        if apart(sums[0]["weights"], sums[1]["weights"])[0] > EQUAL:  # the last step has changed them in another way
            return Finding("optimizer not restored", f"{where} the weights differ")
        if rates:
            what = f"{where} {b[0]['rates']} instead of {a[0]['rates']}"
            return Finding("scheduler not restored" if k else "learning rate not restored", what)
        off, name = apart(sums[0]["gradients"], sums[1]["gradients"])
        if off > EQUAL:
            chance = again.names("chance")
            what = f"{where} the gradient of {name} differs"
            return Finding("random state not restored" if chance else "weights not restored", what)
    return printed(whole, again, after)


def wrong_start(whole, place, first, after) -> tuple:
    """Name the difference where the first step has the samples of another step than its weights say."""
    where = f"after {after} the weights are those of {place} steps, the samples those of"
    if first is None:
        return "another order after resume", f"{where} no step of the uninterrupted run"
    if first == place - 1 and whole.steps[first][0]["taken"] != whole.steps[0][0]["taken"]:
        return "step counted twice", f"{where} step {first + 1}"
    return "order restarts" if first < place else "step skipped", f"{where} step {first + 1}"


def printed(whole, again, after):
    """Return whether the losses printed after a resume are no part of those that the uninterrupted run prints."""
    expected, losses = whole.ranks[0].printed(), again.ranks[0].printed()
    if not losses or not expected:
        return None
    for offset in range(len(expected)):
        pairs = list(zip(expected[offset:], losses, strict=False))
        if all(name == other and abs(a - b) <= 2 * half for (name, a, half), (other, b, _) in pairs):
            return None
    what = "after {} {} {:g} is printed, and never in the uninterrupted run".format(after, *losses[0])
    return Finding("printed loss differs", what)

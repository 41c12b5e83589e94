"""Stops the reader's script, starts it again by the same command, and follows it beside an uninterrupted run."""

import shutil
import signal

from mpdemo.same import compare
from mpdemo.same.findings import Finding
from mpdemo.same.worlds import refuse

EPOCHS = 3
EQUAL = 1e-5  # relative: a resume in the same world repeats the same arithmetic


def verdict(watcher, processes, other) -> dict:
    """Return what a stop by SIGTERM and one by SIGKILL change, and whether another number of processes can go on."""
    without = watcher.args.without
    whole = watcher.run_new(processes, without=without, epochs=EPOCHS)
    refuse(whole)
    steps = sum(step["number"] == whole.steps[0]["number"] for step in whole.steps)
    stop = max(1, min(steps + max(1, steps // 2), len(whole.steps) - 1))
    killed = watcher.run(processes, without, stop={"signal": signal.SIGKILL, "step": stop}, epochs=EPOCHS)
    rows, notes = {"": ["resumes with the weights of step"]}, []
    if not killed.names("file"):
        findings = [Finding("no checkpoint", f"none was written in {stop} steps")]
        return answer(processes, findings, notes, rows)
    copy = killed.folder.with_name(f"{killed.folder.name}-copy")
    shutil.copytree(killed.folder, copy, symlinks=True)
    again = watcher.run(processes, without, folder=killed.folder, epochs=EPOCHS)
    findings, rows["SIGKILL"] = list(follow(whole, again, "SIGKILL")), [place_of(whole, again)]
    if other != processes and place_of(whole, again):
        elsewhere = watcher.run(other, without, folder=copy, epochs=EPOCHS)
        if not place_of(whole, elsewhere):
            what = f"{other} process{'es' * (other > 1)} cannot go on: {elsewhere.error or 'begins with other weights'}"
            findings.append(Finding("another world size not readable", what))
        rows[f"with {other} process{'es' * (other > 1)}"] = [place_of(whole, elsewhere)]
    if any(note["there"] for note in whole.ranks[0].of("handler")):
        stopped = watcher.run(processes, without, stop={"signal": signal.SIGTERM, "step": stop}, epochs=EPOCHS)
        if stopped.how == "silent":
            findings.append(Finding("hangs", "after SIGTERM"))
        again = watcher.run(processes, without, folder=stopped.folder, epochs=EPOCHS)
        known = {finding.name for finding in findings}
        findings += [finding for finding in follow(whole, again, "SIGTERM") if finding.name not in known]
        rows["SIGTERM"] = [place_of(whole, again)]
    else:
        notes.append("the script does not handle SIGTERM: judged by the resume from its last checkpoint alone")
    return answer(processes, findings, [f"stopped in step {stop + 1}", *notes], rows)


def answer(processes, findings, notes, rows) -> dict:
    """Return a verdict as the command shows it."""
    good, bad = "resumes as if it had never stopped", "does NOT resume as it should"
    return {"processes": processes, "findings": findings, "notes": notes, "table": rows, "good": good, "bad": bad}


def place_of(whole, again) -> int | None:
    """Return after how many steps of the uninterrupted run its weights are those with which the other one begins."""
    starts = [run.ranks[0].of("start") for run in (whole, again)]
    if not all(starts):
        return None
    before = [starts[0][0], *whole.steps]
    start = starts[1][0]
    near = [all(compare.distance(b[name], start[name]) < EQUAL for name in ("weights", "mixed")) for b in before]
    return near.index(True) if True in near else None


def follow(whole, again, after):
    """Yield the first difference of a resumed run from the uninterrupted one."""
    if not again.steps:
        yield Finding("fails on resume", f"after {after}: {again.error or 'no step seen'}")
        return
    place = place_of(whole, again)
    expected, drawn = compare.in_steps(whole), compare.in_steps(again)
    samples = [sorted(step, key=str) for step in expected]
    first = samples.index(sorted(drawn[0], key=str)) if drawn and sorted(drawn[0], key=str) in samples else None
    if not place:
        name = "weights not restored" if first or place is None else "does not resume"
        start = "no step" if place is None else "the start"
        yield Finding(name, f"after {after} its first weights are those of {start}")
        return
    if first != place and place < len(samples) and drawn:
        yield Finding(*wrong_start(whole, place, first, after))
        return
    for k, (a, b) in enumerate(zip(whole.steps[place:], again.steps, strict=False)):
        where = f"after {after}, in step {place + k + 1}"
        if place + k < len(samples) and samples[place + k] != sorted(drawn[k], key=str):
            yield Finding("another order after resume", f"{where} other samples are drawn")
            return
        if difference := different(a, b, again):
            name, value = difference
            name = "learning rate not restored" if value == "rates" and k == 0 else name
            show = str if value == "rates" else "{:.8g}".format
            yield Finding(name, f"{where} {value} {show(b[value])} instead of {show(a[value])}")
            return
    yield from printed(whole, again, after)


def wrong_start(whole, place, first, after) -> tuple:
    """Name the difference where the first step has the samples of another step than its weights say."""
    where = f"after {after} the weights are those of {place} steps, the samples those of"
    if first is None:
        return "another order after resume", f"{where} no step of the uninterrupted run"
    if first == place - 1 and whole.steps[first]["taken"] != whole.steps[0]["taken"]:
        return "step counted twice", f"{where} step {first + 1}"
    return "order restarts" if first < place else "step skipped", f"{where} step {first + 1}"


def different(a, b, again):
    """Return the name of the first thing in which two steps on the same samples differ, and the value that shows it."""
    if any(compare.distance(x, y) > EQUAL for x, y in zip(a["rates"], b["rates"], strict=False)):
        return "scheduler not restored", "rates"
    if compare.distance(a["gradient"], b["gradient"]) > EQUAL:
        return "random state not restored" if again.names("chance") else "weights not restored", "gradient"
    if any(compare.distance(a[name], b[name]) > EQUAL for name in ("weights", "mixed")):
        return "optimizer not restored", "weights"
    return None


def printed(whole, again, after):
    """Yield whether the losses printed after a resume are no part of those that the uninterrupted run prints."""
    expected, losses = whole.ranks[0].printed(), again.ranks[0].printed()
    if not losses or not expected:
        return
    for offset in range(len(expected)):
        pairs = list(zip(expected[offset:], losses, strict=False))
        if all(name == other and abs(a - b) <= 2 * half for (name, a, half), (other, b, _) in pairs):
            return
    name, value, _ = losses[0]
    yield Finding(
        "printed loss differs", f"after {after} {name} {value:g} is printed, and never in the uninterrupted run"
    )

"""Compares what is no weight: buffers, averaged copies, queues, statistics, a scaler's scale, and files of tensors."""

import math

from mpdemo.tools.same.finding import Finding, shown, tolerance

SAME = 1e-5  # relative: the same arithmetic
SHARE = 0.1
STATISTICS = ("running_mean", "running_var")  # of BatchNorm, whose ranks are known to differ


def other(a, b, limit) -> list:
    """Return the names of what two ranks hold and has other values; of other shapes are parts of a batch.

    A small tensor is measured by a share of the largest one beside it, or rounding would decide.
    """
    largest, found = {}, []
    for name, value in a.items():
        top = name.partition(".")[0]
        largest[top] = max(largest.get(top, 0.0), math.sqrt(value[0]) if value else 0.0)
    for name in a.keys() & b.keys():
        one, two = a[name], b[name]
        if one and two and one[3] == two[3]:
            size = max(math.sqrt(one[0]), math.sqrt(two[0])) + SHARE * largest[name.partition(".")[0]]
            if max(abs(x - y) for x, y in zip(one[1:3], two[1:3], strict=True)) > limit * max(size, 1e-6):
                found.append(name)
    return sorted(found)


def kinds(step, *names) -> dict:
    """Return the state of a rank, of some kinds."""
    state = step["state"]
    return {name: value for kind in names for name, value in state[kind].items()}


def before(one, many, k) -> list:
    """Return what of the state differs between the ranks, or from one process, when step k is computed.

    What is neither in a module nor a copy of one may come, in the first step, from this step's batch alone.
    """
    names = ("buffers", "copies", "other") if k else ("buffers", "copies")
    for place in (k, k - 1)[: 1 + bool(k)]:
        alone, *ranks = (kinds(step, *names) for step in (one.steps[place][0], *many.steps[place]))
        found = other(ranks[0], ranks[-1], SAME) + other(alone, ranks[0], 10 * tolerance(one, many))
        # no part of a batch
        found = [name for name in found if name in alone and alone[name][3] == ranks[0][name][3]]
        if found := [name for name in dict.fromkeys(found) if not name.endswith(STATISTICS)]:
            return found
    return []


def of_state(one, many):
    """Yield what of the state differs after the last step that both have made."""
    count = min(len(one.steps), len(many.steps))
    if not count:
        return
    alone, *ranks = one.steps[count - 1][0], *many.steps[count - 1]
    limit = 10 * tolerance(one, many)
    copies = other(kinds(alone, "copies"), kinds(ranks[0], "copies"), limit)
    common = [
        name
        for name in copies
        if name not in other(kinds(ranks[0], "copies"), kinds(ranks[-1], "copies"), SAME)
    ]
    if common:
        what = f"after step {count} {shown(common)} have other values than with one process"
        yield Finding("copy of the weights differs", what, ranks[0]["where"])
    buffers = other(kinds(alone, "buffers"), kinds(ranks[0], "buffers"), limit)
    if buffers := [name for name in buffers if not name.endswith(STATISTICS)]:
        what = f"after step {count} {shown(buffers)} have other values than with one process"
        yield Finding("buffers differ", what, ranks[0]["where"])


def of_saved(one, many):
    """Yield the first file of tensors that has other contents than with one process."""
    limit, alone = 10 * tolerance(one, many), saves(one)
    for key, note in saves(many).items():
        if key in alone and (difference := contents(alone[key]["state"], note["state"], limit)):
            yield Finding(
                "file of tensors differs",
                f"{key[0]}, saved after step {key[1]}: {difference}",
                note["where"],
            )
            return


def saves(world, begin=0) -> dict:
    """Return what rank 0 saved, by file and number of steps."""
    return {(note["file"], note["step"] + begin): note for note in world.ranks[0].of("saved")}


def contents(a, b, limit) -> str:
    """Return how the tensors of two files differ, or an empty text."""
    if missing := [name for name in a if name not in b]:
        return f"{shown(missing)} not in it with several processes"
    if more := [name for name in b if name not in a]:
        return f"{shown(more)} only in it with several processes"
    names = [name for name in other(a, b, limit) if not name.endswith(STATISTICS)]
    return f"other values of {shown(names)}" if names else ""


def lost(whole, again, place, k):
    """Return what of the state a resume has not restored, in its step k."""
    expected, found = whole.steps[place + k][0], again.steps[k][0]
    names = other(kinds(expected, "buffers", "copies"), kinds(found, "buffers", "copies"), SAME)
    if names:
        return Finding(
            "state not restored", f"{shown(names)} differ in step {place + k + 1}", found["where"]
        )
    return None


def lost_in_files(whole, again, place):
    """Return the first file of tensors that a resume writes with other contents."""
    expected = saves(whole)
    for key, note in saves(again, place).items():
        if key in expected and (names := other(expected[key]["state"], note["state"], SAME)):
            what = f"{key[0]}, saved after step {key[1]}, has other values of {shown(names)}"
            return Finding("file differs after resume", what, note["where"])
    return None

"""What ranks hold and compute besides the chain: modules, frozen weights, buffers, copies, files of tensors."""

import math

from mpdemo.tools.same.finding import Finding, apart, norm, shown, tolerance

SAME = 1e-5  # relative: the same arithmetic
SHARE = 0.1  # of the largest tensor beside it: what a small one is measured by
STATISTICS = ("running_mean", "running_var")  # of BatchNorm, whose ranks are known to differ
BATCH_NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}


def cut_off(one, many) -> list:
    """Return the parameters that have a gradient with one process, and none at all with several.

    Not those that have none in some steps, such as the rows of an embedding that no sample uses, or an expert.
    """
    count = min(len(one.steps), len(many.steps))
    found = [[world.sums[k]["gradients"] for k in range(count)] for world in (one, many)]
    names = {name for step in found[0] for name in step}
    shares = [{n: [s[n][0] ** 0.5 / (norm(s) or 1.0) for s in w if n in s] for n in names} for w in found]
    dead = [n for n in names if count > 1 and not any(shares[1][n]) and len(shares[0][n]) == count]
    return sorted(n for n in dead if 2 * sum(share > SAME for share in shares[0][n]) > count)


def other_untrained(one, many) -> list:
    """Return the names of what is not trained, such as a teacher's parameters, and has other values in some rank."""
    return [name for name, row in one.untrained.items() if apart({name: row}, many.untrained)[0] > SAME]


def returned(world) -> dict:
    """Return for each module and row what it was given and what it returned, and the class of the module."""
    found = {}
    for note in (note for rank in world.ranks for note in rank.of("output")):
        given = note["given"] or [[0.0, 0.0]] * len(note["rows"])
        for row, taken, gave in zip(note["rows"], given, note["returned"], strict=False):
            found.setdefault((note["module"], row), (taken, gave, note["type"]))
    return found


def first_module(one, many, untrained):
    """Return the first module that returns something else for an equal row in the first step: a finding, and a text.

    One with other weights does, too, and may be there for a metric alone.
    """
    alone, together, limit = returned(one), returned(many), 5 * tolerance(one, many)
    for key in alone:
        if key not in together or any(is_inside(name, key[0]) for name in untrained):
            continue
        (taken, gave, kind), (taken_too, gave_too, other) = alone[key], together[key]
        if near(taken, taken_too, limit / 10) and not near(gave, gave_too, limit):
            text = f"{key[0] or 'the model'} ({kind})"
            if kind != other and not {kind, other} <= BATCH_NORMS:
                return "another module", f"{text}, and {other} with {many.processes}"
            return "BatchNorm of each rank" if "BatchNorm" in kind else "module over the batch", text
    return None


def is_inside(name, place) -> bool:
    """Whether a parameter is one of a module; the names of models other than the first begin with their own."""
    (owner, _, path), (model, _, module) = name.rpartition(":"), place.rpartition(":")
    return owner == model and (not module or path.startswith(f"{module}."))


def near(a, b, limit) -> bool:
    """Whether two rows have the same norm and projection."""
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= limit * max(a[0], b[0], 1e-6)


def other(a, b, limit) -> list:
    """Return the names of what two ranks hold and has other values; of other shapes are parts of a batch."""
    size = {
        n: max(math.sqrt(row[0]) for row in (a[n], b[n]) if row)
        for n in a.keys() & b.keys()
        if a[n] and b[n]
    }
    beside = SHARE * max(size.values(), default=0.0)
    return sorted(
        name
        for name in size
        if a[name][3] == b[name][3]
        and not name.endswith(STATISTICS)
        and max(abs(x - y) for x, y in zip(a[name][1:3], b[name][1:3], strict=True))
        > limit * max(size[name] + beside, 1e-6)
    )


def other_state(one, many, k) -> list:
    """Return what of the state differs between the ranks, or from one process, at step k or the one before."""
    for place in (k, k - 1)[: 1 + bool(k)]:
        alone, *ranks = one.steps[place][0]["state"], *(rank["state"] for rank in many.steps[place])
        for kind in ("buffers", "copies"):
            found = other(ranks[0][kind], ranks[-1][kind], SAME)
            if found := found or other(alone[kind], ranks[0][kind], 10 * tolerance(one, many)):
                return found
    return []


def of_state(one, many):
    """Yield what of the state differs after the last step that both have made."""
    count, limit = min(len(one.steps), len(many.steps)), 10 * tolerance(one, many)
    if not count:
        return
    alone, *ranks = one.steps[count - 1][0]["state"], *(rank["state"] for rank in many.steps[count - 1])
    for kind, name in (("copies", "copy of the weights differs"), ("buffers", "buffers differ")):
        found = other(alone[kind], ranks[0][kind], limit)
        if kind == "copies":
            own = other(ranks[0][kind], ranks[-1][kind], SAME)
            found = [n for n in found if n not in own and len(alone[kind]) == len(ranks[0][kind])]
        if found:
            what = f"after step {count} {shown(found)} have other values than with one process"
            yield Finding(name, what, ranks[0]["lines"].get(found[0], ""))


def saves(world, begin=0) -> dict:
    """Return what rank 0 saved, by file and number of steps."""
    return {(note["file"], note["step"] + begin): note for note in world.ranks[0].of("saved")}


def of_saved(one, many):
    """Yield the first file of tensors that has other contents than with one process."""
    alone = saves(one)
    for key, note in saves(many).items():
        if key in alone and (
            said := contents(alone[key]["state"], note["state"], 10 * tolerance(one, many))
        ):
            what = f"{key[0]}, saved after step {key[1]}: {said}"
            yield Finding("file of tensors differs", what, note["where"])
            return


def contents(a, b, limit) -> str:
    """Return how the tensors of two files differ, or an empty text."""
    if missing := [name for name in a if name not in b]:
        return f"{shown(missing)} not in it with several processes"
    if more := [name for name in b if name not in a]:
        return f"{shown(more)} only in it with several processes"
    names = other(a, b, limit)
    return f"other values of {shown(names)}" if names else ""


def lost(whole, again, place, k):
    """Return what of the state a resume has not restored, in its step k."""
    expected, found = whole.steps[place + k][0]["state"], again.steps[k][0]
    for kind in ("buffers", "copies"):
        if len(expected[kind]) == len(found["state"][kind]) and (
            names := other(expected[kind], found["state"][kind], SAME)
        ):
            what = f"{shown(names)} differ in step {place + k + 1}"
            line = found["state"]["lines"].get(names[0]) or found["where"]
            return Finding("state not restored", what, line)
    return None


def lost_in_files(whole, again, place):
    """Return the first file of tensors that a resume writes with other contents."""
    expected = saves(whole)
    for key, note in saves(again, place).items():
        if key in expected and (names := other(expected[key]["state"], note["state"], SAME)):
            what = f"{key[0]}, saved after step {key[1]}, has other values of {shown(names)}"
            return Finding("file differs after resume", what, note["where"])
    return None

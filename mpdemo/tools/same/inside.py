"""What ranks hold and compute besides the chain: modules, frozen weights, buffers, copies, files of tensors."""

import math

from mpdemo.tools.same.finding import EQUAL, Finding, apart, distance, far, norm, shown, tolerance

STATISTICS = ("running_mean", "running_var")  # of BatchNorm, whose ranks are known to differ
BATCH_NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}


def cut(one, many) -> list:
    """Return the parameters of which any rank has another shape than one process; all, if they have other names too."""
    alone, ranks = one.ranks[0].shapes, [rank.shapes for rank in many.ranks]
    found = [name for name, shape in alone.items() if any(rank.get(name, shape) != shape for rank in ranks)]
    other_names = any(rank.keys() != alone.keys() for rank in ranks)
    nowhere = alone.keys() - set().union(*ranks)  # each stage may count its layers from 0
    return [*alone] if other_names and (found or nowhere) else found


def steps_of(one, many) -> range:
    """Return the numbers of the steps that both have made."""
    return range(min(len(one.steps), len(many.steps)))


def cut_off(one, many) -> list:
    """Return the parameters that have a gradient with one process, and none at all with several.

    Not those that have none in some steps, such as the rows of an embedding that no sample uses, or an expert.
    """
    count = len(steps_of(one, many))
    alone, several = (
        [shares_of(sums["gradients"]) for sums in world.sums[:count]] for world in (one, many)
    )
    names = alone[0] if count > 1 else ()
    dead = [name for name in names if not any(step.get(name) for step in several)]
    return sorted(name for name in dead if 2 * sum(step.get(name, 0.0) > EQUAL for step in alone) > count)


def shares_of(sketches) -> dict:
    """Return what share of the norm of all tensors each has."""
    return {name: row[0] ** 0.5 / (norm(sketches) or 1.0) for name, row in sketches.items()}


def other_untrained(one, many) -> list:
    """Return the names of what is not trained, such as a teacher's parameters, and has other values in some rank."""
    return [name for name, row in one.untrained.items() if apart({name: row}, many.untrained)[0] > EQUAL]


def returned(world) -> dict:
    """Return for each module and row what it was given and what it returned, and the class of the module."""
    found = {}
    for note in world.of("output"):
        for row, taken, gave in note["rows"]:
            found.setdefault((note["module"], row), (taken, gave, note["type"]))
    return found


def first_module(one, many):
    """Return the first module that returns something else for an equal row in the first step: a finding, and a text."""
    alone, together, limit = returned(one), returned(many), 5 * tolerance(one, many)
    for key in (key for key in alone if key in together):
        (taken, gave, kind), (taken_too, gave_too, other) = alone[key], together[key]
        if near(taken, taken_too, limit / 10) and not near(gave, gave_too, limit):
            text = f"{key[0] or 'the model'} ({kind})"
            if kind != other and not {kind, other} <= BATCH_NORMS:
                return "another module", f"{text}, and {other} with {many.processes}"
            return "BatchNorm of each rank" if "BatchNorm" in kind else "module over the batch", text
    return None


def agree(alone, *ranks) -> bool:
    """Whether the mean of the ranks' losses is that of one process, in each part of a step."""
    if None in alone or any(None in rank or len(rank) != len(alone) for rank in ranks):
        return False
    return all(distance(a, sum(own) / len(own)) < 1e-4 for a, *own in zip(alone, *ranks, strict=True))


def near(a, b, limit) -> bool:
    """Whether two rows have the same norm and projection."""
    return math.dist(a, b) <= limit * max(a[0], b[0], 1e-6)


def other(a, b, limit) -> list:
    """Return the names of what both hold, with other values; of other shapes are parts of a batch."""
    both = {name: row for name, row in a.items() if row and b.get(name) and row[-1] == b[name][-1]}
    return sorted(n for n, off in far(both, b).items() if off > limit and not n.endswith(STATISTICS))


def of_two(a, b, limit) -> list:
    """Return the names of what differs in two states; copies, which have numbers alone, if both have as many."""
    equal = a.keys() == b.keys()
    return [name for name in other(a, b, limit) if equal or not is_copy(name)]


def is_copy(name) -> bool:
    """Whether a state is a tensor that the script writes in place, and no buffer."""
    return name.startswith("tensor ")


def states_at(one, many, k) -> tuple:
    """Return what of the state differs after a step: between the ranks, and from one process."""
    alone, *ranks = (rank["state"] for rank in (one.steps[k][0], *many.steps[k]))
    return of_two(ranks[0], ranks[-1], EQUAL), of_two(alone, ranks[0], 10 * tolerance(one, many))


def other_state(one, many, k) -> list:
    """Return what of the state differs between the ranks, or from one process, at step k or the one before."""
    both = (states_at(one, many, place) for place in (k, k - 1) if place >= 0)
    return next((found for pair in both for found in pair if found), [])


def of_state(one, many):
    """Yield what of the state differs after the last step that both have made."""
    last = steps_of(one, many)[-1]
    own, found = states_at(one, many, last)
    copies = [name for name in found if is_copy(name) and name not in own]
    buffers = [name for name in found if not is_copy(name)]
    for names, finding in ((copies, "copy of the weights differs"), (buffers, "buffers differ")):
        if names:
            what = f"after step {last + 1} {shown(names)} have other values than with one process"
            yield Finding(finding, what, many.steps[last][0]["lines"].get(names[0], ""))


def lost(whole, again, place, k):
    """Return what of the state a resume has not restored, in its step k."""
    step = again.steps[k][0]
    if names := of_two(whole.steps[place + k][0]["state"], step["state"], EQUAL):
        line = step["lines"].get(names[0]) or step["where"]
        return Finding("state not restored", f"{shown(names)} differ in step {place + k + 1}", line)
    return None


def of_saved(whole, again, place=0, finding="file of tensors differs", limit=EQUAL):
    """Yield the first file of tensors that rank 0 saves with other contents, after so many steps of another run."""
    expected = {(note["file"], note["step"]): note["state"] for note in whole.ranks[0].of("saved")}
    for note in again.ranks[0].of("saved"):
        key = note["file"], place + note["step"]
        if key in expected and (said := contents(expected[key], note["state"], limit)):
            yield Finding(finding, f"{key[0]}, saved after step {key[1]}: {said}", note["where"])
            return


def contents(a, b, limit) -> str:
    """Return how the tensors of two files differ, or an empty text."""
    if odd := sorted(a.keys() ^ b.keys()):
        return f"{shown(odd)} only in one of both"
    names = other(a, b, limit)
    return f"other values of {shown(names)}" if names else ""

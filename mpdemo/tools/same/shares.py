"""What is wrong with the rows that ranks share, their random numbers, and what they send, write and print."""

import itertools
import math
from collections import Counter

from mpdemo.tools.same.finding import BY_NATURE, Finding, distance, norm, shown, tolerance

SHARED, FEW = 0.2, 0.05  # of a step's rows, and of an epoch's: more is no chance


def not_distributed(many) -> Finding | None:
    """Return whether each process trains alone: none has made a process group."""
    starts = many.of("start")
    if many.processes == 1 or not starts or any(note["distributed"] for note in starts):
        return None
    what = f"no process calls init_process_group: {many.processes} processes train {many.processes} models"
    return Finding("not distributed", what, many.steps[0][0]["where"] if many.steps else "")


def of_data(one, many):
    """Yield what is wrong with the samples that the ranks draw, or with the rows where samples have no numbers."""
    if other := not_shared(many):
        yield Finding("samples not shared", f"rank {other[1]} trains on other samples than rank {other[0]}")
        return
    trained = {ranks[0]["number"] for ranks in many.steps}
    passes = [
        [note for note in rank.passes(many.loader) if note["number"] in trained] for rank in many.replicas
    ]
    if many.loader is not None and all(passes):  # then each epoch's order is known whole
        yield from of_order(passes[0])
        epoch = [Counter(sum(of_rank[0]["samples"], [])) for of_rank in passes]
        yield from of_shares([epoch], "samples", FEW)
        yield from of_size(many, one.in_samples, many.in_samples)
        yield from of_ends(passes)
    elif any(many.in_rows) and unequal(one.in_rows, many.in_rows):
        in_epochs = [*epochs_of(many)], "rows", FEW
        told = many.steps[0][0]["epoch"]  # a loop without a loader tells none
        found = [*of_shares(*(in_epochs if told else (many.rows, "rows", SHARED)))]
        yield from found or of_draws(one, many)
        if any(one.in_rows[0] & rows for rows in many.in_rows):  # else rows are something else there
            yield from of_size(many, one.in_rows, many.in_rows)


def of_order(epochs):
    """Yield whether two epochs of a rank have the same order, unless it is that of the numbers."""
    order = sum(epochs[0]["batches"], [])
    repeated = len(epochs) > 1 and epochs[0]["batches"] == epochs[1]["batches"]
    if repeated and order != sorted(order):
        yield Finding("no set_epoch", "two epochs have the same shuffled order")


def of_shares(groups, what, allowed):
    """Yield whether the ranks draw the same; what a rank repeats of its own tells how much of it may be chance."""
    count, first = len(groups[0]), [ranks[0] for ranks in groups]
    if count == 1:
        return
    if all(of_rank == ranks[0] for ranks in groups for of_rank in ranks):
        yield Finding("no sampler", f"all {count} ranks train on the same {first[0].total()} {what}")
        return
    both = sum(max(len(ranks[0] & other) for other in ranks[1:]) for ranks in groups)
    distinct, total = sum(map(len, first)), sum(map(Counter.total, first))
    if both > count * len(groups) and both / distinct > allowed + 4 * (1 - distinct / total):
        what = f"{100 * both / distinct:.0f} % of the {what} are trained on in two ranks"
        yield Finding("another order per rank", what)


def of_draws(one, many):
    """Yield whether some ranks have rows of one process in each step, and others have not, though all draw as much."""
    steps = [*zip(one.in_rows, many.rows, strict=False)]
    drawn = [world.steps[len(steps) - 1][0]["chances"] for world in (one, many)]
    within = [all(ranks[r] <= alone for alone, ranks in steps) for r in range(len(many.replicas))]
    if len(steps) > 1 and drawn[0] == drawn[1] > 0 and any(within) and not all(within):
        what = f"rank {within.index(True)} has rows of one process in each step, rank {within.index(False)} has others"
        yield Finding("another order per rank", what)


def epochs_of(many):
    """Yield the rows that each replica has trained on, by epoch."""
    for _, steps in itertools.groupby(
        zip(many.steps, many.rows, strict=True), lambda step: step[0][0]["epoch"]
    ):
        yield [sum(of_rank, Counter()) for of_rank in zip(*(rows for _, rows in steps), strict=True)]


def of_ends(passes):
    """Yield whether the ranks have other numbers of batches."""
    lengths = [len(of_rank[0]["batches"]) for of_rank in passes]
    if len(set(lengths)) > 1:
        yield Finding("unequal steps", f"an epoch has {lengths} batches in the ranks; the last steps hang")


def not_shared(many):
    """Return two ranks that have parts of one model or sequence, and draw other samples, if there are any."""
    drawn = [[note["samples"] for note in rank.passes(many.loader)] for rank in many.ranks]
    pairs = ((min(shared), k) for k, shared in enumerate(many.shared))
    return next(((first, k) for first, k in pairs if drawn[k] != drawn[first]), None)


def of_size(many, alone, together):
    """Yield whether the first step has another number of samples."""
    alone, together = (next((step.total() for step in steps), 0) for steps in (alone, together))
    if alone and together and alone != together:
        what = f"a step of {many.processes} processes has {together} samples, of one {alone}"
        yield Finding("batch not divided", what)


def unequal(alone, together) -> bool:
    """Whether a step of two worlds differs."""
    return any(a != b for a, b in zip(alone, together, strict=False))


def of_model(many):
    """Yield what makes no comparison of steps worth while: nothing finite, or an optimizer of other parameters."""
    norms = [norm(sums["gradients"]) for sums in many.sums]
    if broken := [k for k, value in enumerate(norms) if not math.isfinite(value)]:
        yield Finding("not finite", f"the gradient of step {broken[0] + 1} is {norms[broken[0]]}")
        return
    if len(norms) > 2 and any(norms) and many.sums[0]["weights"] == many.sums[-1]["weights"]:
        what = f"{len(norms)} steps change no weight of the model that is called"
        yield Finding("optimizer built before wrapping", what)


def of_chance(one, many, kind) -> Finding | str:
    """Return what ranks with other rows draw alike, or a note that they might, or an empty text.

    What belongs to no row, such as the number of a layer that is left out, one process draws as often as each rank.
    """
    alone, drawn = one.ranks[0].drawn(kind)[1], [rank.drawn(kind) for rank in many.replicas]
    note = ""
    for a, b, lines in alike(many, kind):
        if by_row := [line for line in lines if alone[line] >= 1.5 * drawn[a][1][line]]:
            what = f"{BY_NATURE[kind]}: rank {a} and rank {b} draw the same for different rows ({shown(by_row)})"
            seeded = many.replicas[a].names("seeded at")
            # else where the loader is made, whose workers have seeds
            where = "" if kind == "augmentation" else (seeded or by_row)[-1]
            return Finding("same random numbers", what, where)
        note = f"rank {a} and rank {b} draw from equal generators, and nothing for a row of its own ({shown(lines)})"
    return note


def alike(many, kind):
    """Yield two ranks with other rows, and the lines where they draw from equal states."""
    drawn = [rank.drawn(kind)[0] for rank in many.replicas]
    for (a, states), (b, others) in itertools.combinations(enumerate(drawn), 2):
        lines = [line for line in states if states[line] & others.get(line, set())]
        if lines and many.steps and many.rows[0][a] != many.rows[0][b]:
            yield a, b, lines


def reductions(parts) -> list:
    """Return how many messages each backward pass has sent that reduce something."""
    return [sum(n for name, n in part["calls"].items() if "reduce" in name) for part in parts]


def reduced_by_hand(many) -> str:
    """Return the line in which a script without a wrapper reduces more than a number, or an empty text."""
    calls = [] if many.names("wrapped") else many.ranks[0].of("call")
    large = (call for call in calls if "reduce" in call["name"] and call["of"] not in ("", "[]", "[1]"))
    return next((call["where"] for call in large), "")


def of_messages(many):
    """Yield whether accumulation sends gradients with every part although the last would do."""
    steps = [ranks[0]["parts"] for ranks in many.steps if len(ranks[0]["parts"]) > 1]
    if not steps or many.parts() == 1 or len(many.replicas) == 1:
        return
    sent = [*map(reductions, steps)]
    if all(parts[0] and parts == parts[:1] * len(parts) for parts in sent):
        what = f"{sent[0][0]} messages are sent in each of the {len(steps[0])} microbatches of a step"
        yield Finding("accumulation saves nothing", what, steps[0][0]["where"])


def of_files(many):
    """Yield what several ranks write."""
    times = Counter(name for rank in many.ranks for name in set(rank.names("file")))
    if twice := sorted(name for name, number in times.items() if number > 1):
        where = next(note["where"] for note in many.of("file") if note["name"] == twice[0])
        yield Finding("same file from every rank", shown(twice), where)


def of_log(one, many):
    """Yield whether what is printed differs although the training is the same."""
    for (name, a, half), (other, b, _) in zip(
        one.ranks[0].printed(), many.ranks[0].printed(), strict=False
    ):
        if name != other or abs(a - b) <= 2 * half or distance(a, b) <= tolerance(one, many):
            continue
        what = f"{name} {a:g} is printed with one process, {b:g} with {many.processes}"
        summed = distance(b, a * len(many.replicas)) < 0.01
        loss = "loss summed" if summed else "loss of one rank"
        yield Finding(loss if "loss" in name.lower() else "printed metric differs", what)
        return

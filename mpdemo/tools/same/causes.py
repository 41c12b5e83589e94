"""Names the cause where gradients differ: between the ranks of one world, or between several processes and one.

A cause is named only if it was measured: what DDP averages, in which microbatch, and what happens to it afterwards.
"""

import math

from mpdemo.tools.same.finding import Finding, apart, distance, norm, shown

EQUAL = 1e-5  # relative: ranks that did the same arithmetic
FIT = 2e-3  # of a gradient may be left where it is a weighted mean of others


def differing(ranks) -> list:
    """Return the names of the parameters of which ranks with the same part have other values."""
    found, first, total = [], {}, max(norm(ranks[0]), 1e-12)
    for rank in ranks:
        for name, (square, *values, part) in rank.items():
            same = first.setdefault((name, part), values)
            off = max(abs(a - b) for a, b in zip(values, same, strict=True))
            if off > EQUAL * (math.sqrt(square) + EQUAL * total) and name not in found:
                found.append(name)
    return found


def line_of(world, k, part=-1) -> str:
    """Return the line of the backward pass of a step, or of the step itself."""
    step = world.steps[k][0]
    return step["parts"][part]["where"] if step["parts"] else step["where"]


def own_gradient(many, k):
    """Return why ranks keep gradients of their own in a step."""
    steps = many.steps[k]
    ranks = [rank["gradients"] for rank in steps]
    names = differing(ranks)
    if not names:
        return None
    what = f"each rank keeps its own gradient (norms {', '.join(f'{norm(rank):.6g}' for rank in ranks)})"
    if size := many.names("part of the ranks"):
        what += f": the wrapper averages over {size.pop()} of {len(ranks)} ranks"
        return Finding("mesh without reduction", what, line_of(many, k))
    averaged = [rank["averaged"] for rank in steps]
    if all(averaged) and not set(differing(averaged)) & set(names) and (scaled := of_scale(many, k)):
        return scaled
    if found := skipped(many, k) or without_average(many, k, what):
        return found
    if found := outside(many, names, what):
        return found
    if len(names) < len(ranks[0]):
        return Finding("parameters outside the wrapper", f"{what} of {shown(names)}", line_of(many, k))
    if not many.names("wrapped"):
        return Finding("wrapper missing", what, line_of(many, k))
    inner = [note["where"] for note in many.ranks[0].of("called") if not note["wrapper"]]
    return Finding("wrapper bypassed", what, inner[-1] if inner else line_of(many, k))


def of_scale(many, k):
    """Return whether each rank multiplies the average by a number of its own."""
    found = [multiple_of(rank["averaged"], rank["gradients"]) for rank in many.steps[k]]
    times = [factor for factor, rest, _ in found if rest < FIT]
    if len(times) < len(found) or max(times) - min(times) <= 1e-4 * max(map(abs, times)):
        return None
    numbers = ", ".join(f"{factor:.4g}" for factor in times)
    what = f"in step {k + 1} the ranks multiply the averaged gradient by {numbers}, each by a number of its own"
    return Finding("gradient scaled or clipped per rank", what, many.steps[k][0]["where"])


def multiple_of(a, b) -> tuple:
    """Return by which factor tensors `b` are a multiple of `a`, how far they are from it, and which one most of all."""
    names = a.keys() & b.keys()
    square = sum(number**2 for name in names for number in a[name][1:3])
    if not square or not math.isfinite(square):
        return None, 1.0, ""
    times = sum(x * y for name in names for x, y in zip(a[name][1:3], b[name][1:3], strict=True)) / square
    scaled = {name: [b[name][0], *(times * x for x in a[name][1:3])] for name in names}
    return times, *apart(scaled, {name: b[name] for name in names}, 1e-3)


def skipped(many, k):
    """Return whether a rank has gone back more often than another before a step of the same number."""
    passes = [rank["backwards"] for rank in many.steps[k]]
    if len(set(passes)) == 1:
        return None
    rank = passes.index(max(passes))
    what = f"after {max(passes)} backward passes rank {rank} has made {k + 1} steps, another after {min(passes)}"
    return Finding(
        "a rank skips", f"{what}: one of them leaves a batch or a step out", many.steps[k][rank]["where"]
    )


def without_average(many, k, what):
    """Return whether DDP's average comes before the last microbatch, or not at all."""
    parts = many.steps[k][0]["parts"]
    synced = [number for number, part in enumerate(parts, 1) if part["synced"]]
    if not parts or parts[-1]["synced"] is not False:
        return None
    where, numbers = many.ranks[0].names("no_sync"), ", ".join(map(str, synced))
    when = f"in microbatch {numbers} of {len(parts)}" if synced else f"in none of {len(parts)} microbatches"
    what += f": DDP averages {when}, and not with the last backward pass before the step"
    return Finding("no_sync at the wrong part", what, where[0] if where else line_of(many, k))


def outside(many, names, what):
    """Return which parameters DDP never averages, and why."""
    out = [note["outside"] for note in many.ranks[0].of("model")]
    if "DDP" not in many.names("wrapped") or not out or not set(names) <= out[-1].keys():
        return None
    built = many.ranks[0].names("wrapped at")[-1]
    what += f" of {shown(names)}"
    if all(out[-1][name] for name in names):
        what += ": they wanted no gradient when DDP was built, and DDP doesn't know them"
        return Finding("unfrozen after wrapping", what, built)
    called = {note["number"]: note["where"] for note in many.ranks[0].of("called") if not note["wrapper"]}
    owners = {int(name.partition(":")[0]) if ":" in name else 0 for name in names}
    if len(owners) == 1 and (where := called.get(owners.pop())):
        return Finding(
            "second module not wrapped", f"{what}, of a module that is called without a wrapper", where
        )
    return Finding("parameters outside the wrapper", f"{what}, which DDP was not given", built)


def weights_of(ranks, whole):
    """Return by which weights the gradients of the ranks make one of the whole batch, and what share is left over."""
    names = set(whole).intersection(*ranks)
    columns = [[x for name in names for x in rank[name][1:3]] for rank in ranks]
    target = [x for name in names for x in whole[name][1:3]]
    size = math.sqrt(sum(x * x for x in target))
    if len(target) < 2 * len(ranks) + 2 or not size or not math.isfinite(size):
        return [], 1.0
    rows = [
        [sum(a * b for a, b in zip(one, other, strict=True)) for other in (*columns, target)]
        for one in columns
    ]
    weights = solved(rows)
    fitted = [
        sum(w * column[k] for w, column in zip(weights, columns, strict=True)) for k in range(len(target))
    ]
    return weights, math.sqrt(sum((a - b) ** 2 for a, b in zip(fitted, target, strict=True))) / size


def solved(rows) -> list:
    """Return the solution of linear equations, by elimination."""
    rows, count = [list(row) for row in rows], len(rows)
    for k in range(count):
        best = max(range(k, count), key=lambda number: abs(rows[number][k]))
        rows[k], rows[best] = rows[best], rows[k]
        lead = rows[k][k] or 1e-30
        rows[k] = [x / lead for x in rows[k]]
        for other in range(count):
            if other != k:
                rows[other] = [x - rows[other][k] * y for x, y in zip(rows[other], rows[k], strict=True)]
    return [row[-1] for row in rows]


def of_loss(one, many, k, what):
    """Tell a mean over unequal counts from a loss that is no mean over rows, by the gradients of the ranks."""
    ranks, whole = [rank["local"] for rank in many.steps[k]], one.steps[k][0]["local"]
    weights, left = weights_of(ranks, whole) if len(many.replicas) == len(ranks) > 1 else ([], 1.0)
    if not weights:
        return None
    if left < FIT and max(distance(weight, 1 / len(weights)) for weight in weights) > FIT:
        shares = " and ".join(f"{weight:.3f}" for weight in weights)
        what += f"; with one process the ranks' gradients count {shares}, not {1 / len(weights):.3g} each"
        return Finding("mean of means", what, line_of(many, k))
    parts = {len(world.steps[k][0]["parts"]) for world in (one, many)}
    if left > 5 * FIT and parts == {1}:
        what += "; no weighted mean of the ranks' gradients is that of one process: the loss is no mean over rows"
        return Finding("loss over the batch", what, line_of(many, k))
    return None

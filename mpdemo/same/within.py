"""Compares the ranks of one world with each other, whatever the samples of another world are.

What an optimizer uses must be the mean of the gradients that the ranks have computed, and the same in all of them.
"""

import math

from mpdemo.same.compare import Finding, apart, norm, shown, tolerance

EQUAL = 1e-5  # relative: ranks that did the same arithmetic
AFTER = {"barrier", "monitored_barrier", "destroy_process_group"}  # a rank that waits in them has left the loop
LEFT = ("Connection closed", "Connection reset", "closed by peer", "recvValue", "Broken pipe")


def of_ranks(one, many):
    """Yield the first thing in which the ranks differ from each other, or from the mean."""
    checks = [own_gradient, other_rates, other_weights]
    if many.names("tensor"):  # what is replicated in them is never averaged: other weights are the cause
        checks.reverse()
    for k in range(len(many.steps)):
        for check in checks:
            if finding := check(many, k):
                yield finding
                return
    yield from of_mean(one, many)


def other_rates(many, k):
    """Return whether the ranks have other learning rates in a step."""
    rates = [rank["rates"] for rank in many.steps[k]]
    if len({tuple(of_rank) for of_rank in rates if len(of_rank) == len(rates[0])}) < 2:
        return None
    numbers = ", ".join(f"{of_rank[0]:.6g}" for of_rank in rates)
    return Finding("learning rates differ", f"in step {k + 1} the ranks have {numbers}")


def other_weights(many, k):
    """Return whether the ranks have other values of what they all hold before a step."""
    ranks = [rank["weights"] for rank in many.steps[k]]
    names = differing(ranks)
    if not names:
        return None
    norms, who = ", ".join(f"{norm(rank):.6g}" for rank in ranks), "tensor parallel ranks" * bool(many.names("tensor"))
    what = f"before step {k + 1} {who or 'the ranks'} have other values of {shown(names)} (norms of all {norms})"
    return Finding("weights differ", what)


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


def own_gradient(many, k):
    """Return why ranks keep gradients of their own in a step."""
    ranks = [rank["gradients"] for rank in many.steps[k]]
    names = differing(ranks)
    if not names:
        return None
    what = f"each rank keeps its own gradient (norms {', '.join(f'{norm(rank):.6g}' for rank in ranks)})"
    if size := many.names("part of the ranks"):
        what += f": the wrapper averages over {size.pop()} of {len(ranks)} ranks"
        return Finding("mesh without reduction", what)
    if len(names) < len(ranks[0]):
        return Finding("parameters outside the wrapper", f"{what} of {shown(names)}")
    return Finding("wrapper bypassed" if many.names("wrapped") else "wrapper missing", what)


def factor(sums) -> tuple:
    """Return by how much the used gradients are larger than the mean of the ranks' own, and what else is in them."""
    used, own = sums["gradients"], sums["local"]
    names = used.keys() & own.keys()
    square = sum(number**2 for name in names for number in own[name][1:])
    if not square or not math.isfinite(square):
        return None, 0.0, ""
    product = sum(a * b for name in names for a, b in zip(used[name][1:], own[name][1:], strict=True))
    scaled = {name: [used[name][0], *(product / square * x for x in own[name][1:])] for name in names}
    return product / square, *apart(scaled, {name: used[name] for name in names}, 1e-3)


def of_mean(one, many):
    """Yield whether the used gradients are no mean of the ranks' own, or a multiple of it."""
    replicas, factors = len(many.replicas), []
    for k, sums in enumerate(many.sums):
        times, rest, name = factor(sums)
        if times is None:
            continue
        if rest > tolerance(many):
            compressed = "gradients compressed" if many.names("hook") else "gradient is no mean"
            what = f"in step {k + 1} {rest:.2g} of the gradient of {name} is no mean of the ranks' own"
            yield Finding(compressed, what)
            return
        alone = factor(one.sums[k])[0] if k < len(one.sums) else None
        factors.append(times / (alone or 1.0))
    if not factors or max(factors) - min(factors) > 0.01 * max(factors):
        return
    what = f"in each step the gradient is {factors[0]:.4g} times the mean of the ranks' own"
    if replicas > 1 and abs(factors[0] - replicas) < 0.01 * replicas:
        yield Finding("gradients summed", what)
    elif replicas > 1 and abs(factors[0] * replicas - 1) < 0.01:
        yield Finding("gradients divided twice", what)
    elif abs(factors[0] - 1) > 0.01:
        yield Finding("gradient scaled", what)


def is_mean(many) -> int:
    """Return in how many steps the used gradients were seen to be the mean of the ranks' own."""
    return sum(factor(sums)[0] is not None for sums in many.sums)


def of_failure(many):
    """Return why a world of several has not come to its end, or nothing."""
    if many.how == "ended" and not many.error:
        return None if many.steps else Finding("fails with several", "no step of an optimizer is seen")
    ended = [rank for rank, status in many.statuses.items() if status == 0]
    if ended and (many.how != "ended" or any(text in many.error for text in LEFT)):
        other = next(rank for rank in range(many.processes) if rank not in ended)
        what = f"rank {ended[0]} ends after {len(many.ranks[ended[0]].steps)} steps, and rank {other} waits for it"
        return Finding("a rank leaves early", what)
    if many.error:
        return Finding("fails with several", many.error)
    waits = [rank.waits(many.folder) for rank in many.ranks]
    where = ", ".join(f"rank {k} waits in {name} ({line})" for k, (name, line) in enumerate(waits) if line)
    what = f"nothing new for {many.order['limit']} s after {len(many.steps)} steps; {where}".removesuffix("; ")
    names = {name for name, _ in waits}
    return Finding("a rank leaves early" if len(names) > 1 and names & AFTER else "hangs", what)

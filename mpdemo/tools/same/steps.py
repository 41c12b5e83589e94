"""Compares steps: of the ranks of one world with each other, then of several processes with those of one.

What an optimizer uses must be the mean of the gradients that the ranks have computed, and the same in all of them,
whatever the samples. On equal rows the steps of one process are the same, or a module is named that differs first.
"""

from mpdemo.tools.same import causes, held
from mpdemo.tools.same.causes import EQUAL, differing, line_of, own_gradient
from mpdemo.tools.same.finding import Finding, apart, distance, norm, shown, tolerance

SCALED = ("gradients summed", "gradients divided twice", "gradient scaled")  # found in the ranks alone
BATCH_NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}
GROWTH = 10.0  # from step to step: what begins as rounding may grow, a fault jumps


def of_ranks(one, many) -> Finding | None:
    """Return the first thing in which the ranks differ from each other, or from the mean."""
    checks = [other_batches, own_gradient, other_rates, other_weights]
    if many.names("tensor"):  # what is replicated in them is never averaged: other weights are the cause
        checks.reverse()
    for k in range(len(many.steps)):
        for check in checks:
            if finding := check(many, k):
                return finding
    return of_mean(one, many)


def other_batches(many, k):
    """Return whether the ranks train on batches of other numbers in a step of one batch."""
    ranks = [rank.steps[k] for rank in many.replicas]
    drawn = [step["taken"] for step in ranks]
    one_pass = (
        len({(step["loader"], step["number"]) for step in ranks}) == 1 and ranks[0]["loader"] is not None
    )
    if not one_pass or len(set(drawn)) == 1 or any(len(step["parts"]) != 1 for step in ranks):
        return None
    said = ", ".join(f"rank {rank} with its batch {number}" for rank, number in enumerate(drawn))
    return Finding("a rank skips", f"step {k + 1} is made by {said} of an epoch", ranks[0]["where"])


def other_rates(many, k):
    """Return whether the ranks have other learning rates in a step."""
    rates = [rank["rates"] for rank in many.steps[k]]
    if len({tuple(of_rank) for of_rank in rates if len(of_rank) == len(rates[0])}) < 2:
        return None
    numbers = ", ".join(f"{of_rank[0]:.6g}" for of_rank in rates)
    where = many.steps[k][0]["where"]
    return Finding("learning rates differ", f"in step {k + 1} the ranks have {numbers}", where)


def other_weights(many, k):
    """Return whether the ranks have other values of what they all hold before a step."""
    ranks = [rank["weights"] for rank in many.steps[k]]
    names = differing(ranks)
    if not names:
        return None
    norms, who = (
        ", ".join(f"{norm(rank):.6g}" for rank in ranks),
        "tensor parallel ranks" * bool(many.names("tensor")),
    )
    what = f"before step {k + 1} {who or 'the ranks'} have other values of {shown(names)} (norms of all {norms})"
    if k and (skip := causes.skipped(many, k)):
        return skip
    return Finding("weights differ", what, many.steps[max(k - 1, 0)][0]["where"])


def factor(sums) -> tuple:
    """Return by how much the used gradients are larger than the mean of the ranks' own, and what else is in them."""
    return causes.multiple_of(sums["local"], sums["gradients"])


def of_mean(one, many):
    """Return whether the used gradients are no mean of the ranks' own, or a multiple of it."""
    factors = []
    for k, sums in enumerate(many.sums):
        times, rest, name = factor(sums)
        if times is None:
            continue
        if rest > tolerance(many):
            compressed = "gradients compressed" if many.names("hook") else "gradient is no mean"
            what = f"in step {k + 1} {rest:.2g} of the gradient of {name} is no mean of the ranks' own"
            return scaled_by_rank(many, k) or Finding(compressed, what, line_of(many, k))
        alone = factor(one.sums[k])[0] if k < len(one.sums) else None
        factors.append(times / (alone or 1.0))
    if not factors or max(factors) - min(factors) > 0.01 * max(factors) or distance(factors[0], 1) < 0.01:
        return None
    what = f"in each step the gradient is {factors[0]:.4g} times the mean of the ranks' own"
    return Finding(multiple(factors[0], many) or "gradient scaled", what, line_of(many, 0))


def scaled_by_rank(many, k):
    """Return whether the ranks' parts of the average are multiplied by numbers of their own, as by a norm of each."""
    return causes.of_scale(many, k) if all(rank["averaged"] for rank in many.steps[k]) else None


def multiple(times, many, near=0.01) -> str:
    """Return the name of what makes gradients so many times as large, if it is the number of replicas."""
    count = len(many.replicas)
    names = {"gradients summed": count, "gradients divided twice": 1 / count} if count > 1 else {}
    return next((name for name, expected in names.items() if distance(times, expected) < near), "")


def of_steps(one, many, turned=None) -> Finding | None:
    """Return the first difference of the steps: samples, ranks and averaging are known to be right.

    `turned` is one process with the samples of each batch in another order, which shows what rounding grows to.
    """
    limit, said = tolerance(one, many), "{}{:.6g} with one process, {:.6g} with " + str(many.processes)
    start = (one.sums[0]["weights"], many.sums[0]["weights"]) if one.sums and many.sums else ({}, {})
    if apart(*start)[0] > limit:
        return Finding("first weights differ", said.format("norm ", *map(norm, start)))
    if cut := cut_off(one, many):
        return cut
    allowed = limit
    for k, (a, b) in enumerate(zip(one.sums, many.sums, strict=False)):
        if rates := of_rates(one, many, k, said):
            return rates
        off, name = apart(a["gradients"], b["gradients"])
        if turned and k < len(turned.sums):
            allowed = max(allowed, GROWTH * apart(a["gradients"], turned.sums[k]["gradients"])[0])
        if not off <= allowed:
            return cause_of_gradient(one, many, k, name, said)
        allowed = max(limit, GROWTH * off)
    if (
        len(one.steps) != len(many.steps)
        and one.how == many.how == "ended"
        and not many.names("more epochs")
    ):
        what = f"{len(many.steps)} steps with {many.processes} processes, {len(one.steps)} with one"
        return Finding("other steps", what, many.steps[-1][0]["where"])
    return None


def cut_off(one, many):
    """Return whether some parameters have a gradient with one process, and none at all with several.

    Not those that have none in some steps, such as the rows of an embedding that no sample uses, or an expert.
    """
    count = min(len(one.steps), len(many.steps))
    alone, together = (strengths(world.steps[:count]) for world in (one, many))
    dead = [
        name for name, values in together.items() if len(values) > 1 and not any(values) and name in alone
    ]
    cut = [name for name in dead if 2 * sum(value > EQUAL for value in alone[name]) > len(alone[name])]
    if not cut:
        return None
    what = f"with {many.processes} processes the gradient of {shown(cut)} is exactly 0 or None in all {count} steps"
    return Finding("gradient cut off", f"{what}, and with one it is not: nothing is learned there")


def strengths(steps) -> dict:
    """Return for each parameter its largest gradient in each step, over all ranks, as a share of all parameters'."""
    found = {}
    for ranks in steps:
        largest = {}
        for name, value in (item for rank in ranks for item in rank["largest"].items()):
            largest[name] = max(value, largest.get(name, 0.0))
        for name, value in largest.items():
            found.setdefault(name, []).append(value / (max(largest.values()) or 1.0))
    return found


def of_rates(one, many, k, said):
    """Return what is wrong with the learning rates of a step."""
    alone, together = one.steps[k][0], many.steps[k][0]
    pairs = [
        pair for pair in zip(alone["rates"], together["rates"], strict=False) if distance(*pair) > 1e-6
    ]
    if not pairs:
        return None
    what = said.format(f"in step {k + 1} ", *pairs[0])
    if k and together["scheduled"] == many.processes * alone["scheduled"] > 0:
        return Finding(
            "scheduler steps once per process", what, next(iter(many.ranks[0].names("scheduler at")), "")
        )
    return Finding("learning rate changes", what, many.steps[k][0]["where"])


def cause_of_gradient(one, many, k, name, said) -> Finding:
    """Name the cause of another gradient in step k."""
    norms = [norm(world.sums[k]["gradients"]) for world in (one, many)]
    what = said.format(f"in step {k + 1} the norm is ", *norms)
    if k and (changed := apart(one.sums[k]["weights"], many.sums[k]["weights"]))[0] > 10 * tolerance(
        one, many
    ):
        what += f"; step {k} has changed {changed[1]} in another way"
        return Finding("another update", what, many.steps[k - 1][0]["where"])
    ratio, untrained = norms[1] / max(norms[0], 1e-12), other_untrained(one, many)
    if module := first_module(one, many, untrained):
        place, kind, batch_norm, other = module
        what += f"; the first module that returns something else for the same row is {place} ({kind})"
        if other != kind:
            what += f", and {other} with {many.processes}"
            return Finding("another module", what, line_of(many, k))
        return Finding(
            "BatchNorm of each rank" if batch_norm else "module over the batch", what, line_of(many, k)
        )
    if cut := many.names("no gradient"):
        what += f"; {shown(sorted(cut))} of a tensor that wants a gradient"
        return Finding("gathered without gradient", what, next(iter(many.ranks[0].names("cut at")), ""))
    if times := multiple(ratio, many):
        return Finding(times, what, line_of(many, k))
    if untrained:
        what += f"; {shown(untrained)}, which nothing trains, have other values in some rank than with one process"
        return Finding("untrained weights differ", what, line_of(many, k))
    if apart(one.sums[k]["local"], many.sums[k]["local"])[0] <= tolerance(one, many):
        what += "; before it is clipped or scaled, it is the same"
        return Finding("gradient scaled", what, many.steps[k][0]["where"])
    if state := held.before(one, many, k):
        what += f"; the ranks have other values of {shown(state)}, or than one process"
        return Finding("state of each rank", what, many.steps[k][0]["where"])
    if loss := causes.of_loss(one, many, k, what):
        return loss
    # over how many targets each part of the step takes its mean: of each rank, of each part of a batch
    terms = [
        [part["terms"] for rank in world.replicas for part in rank.steps[k]["parts"]]
        for world in (one, many)
    ]
    if any(len(set(of_world)) > 1 for of_world in terms):
        return Finding("mean of means", f"{what}; the parts have {terms[1]} terms", line_of(many, k))
    what += f", most of all of {name}"
    modules = {note["module"] for note in many.ranks[0].of("output")}
    same = ["the first weights", "the learning rates", *["the rows"] * any(many.in_rows)]
    same += [f"what {len(modules)} modules return for the first rows"] * bool(modules)
    return Finding(
        "another gradient", f"{what}: cause unknown; equal are {', '.join(same)}", line_of(many, k)
    )


def other_untrained(one, many) -> list:
    """Return the names of what is not trained, such as a teacher's parameters, and has other values in some rank."""
    alone, together = one.untrained, many.untrained
    return [name for name in alone if apart({name: alone[name]}, together)[0] > EQUAL]


def returned(world) -> dict:
    """Return for each module and row what it was given and what it returned, and the class of the module."""
    found = {}
    for rank in world.ranks:
        for note in rank.of("output"):
            given = note["given"] or [[0.0, 0.0]] * len(note["rows"])
            for row, taken, gave in zip(note["rows"], given, note["returned"], strict=False):
                found.setdefault((note["module"], row), (taken, gave, note["type"]))
    return found


def first_module(one, many, untrained):
    """Return name and class of the first module that returns something else for an equal row in the first step.

    One with other weights does, too, and may be there for a metric alone.
    """
    alone, together = returned(one), returned(many)
    limit = 5 * tolerance(one, many)
    for key in alone:
        if key in together and not any(is_inside(name, key[0]) for name in untrained):
            (taken, gave, kind), (taken_too, gave_too, other) = alone[key], together[key]
            if near(taken, taken_too, limit / 10) and not near(gave, gave_too, limit):
                return (
                    key[0] or "the model",
                    kind,
                    "BatchNorm" in kind,
                    kind if {kind, other} <= BATCH_NORMS else other,
                )
    return None


def is_inside(name, place) -> bool:
    """Whether a parameter is one of a module; the names of models other than the first begin with their own."""
    (owner, _, path), (model, _, module) = name.rpartition(":"), place.rpartition(":")
    return owner == model and (not module or path.startswith(f"{module}."))


def near(a, b, limit) -> bool:
    """Whether two rows have the same norm and projection."""
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= limit * max(a[0], b[0], 1e-6)

"""Compares the steps of several processes with those of one, on equal rows, and names the first module that differs."""

from mpdemo.same.compare import Finding, apart, distance, norm, shown, tolerance

GROWTH = 10.0  # from step to step: what begins as rounding may grow, a fault jumps


def of_steps(one, many, turned=None):
    """Yield the first difference of the steps: samples, ranks and averaging are known to be right.

    `turned` is one process with the samples of each batch in another order, which shows what rounding grows to.
    """
    limit, said = tolerance(one, many), "{}{:.6g} with one process, {:.6g} with " + str(many.processes)
    start = (one.sums[0]["weights"], many.sums[0]["weights"]) if one.sums and many.sums else ({}, {})
    if apart(*start)[0] > limit:
        yield Finding("first weights differ", said.format("norm ", *map(norm, start)))
        return
    allowed = limit
    for k, (a, b) in enumerate(zip(one.sums, many.sums, strict=False)):
        if (rates := of_rates(one, many, k, said)) is not None:
            yield rates
            return
        off, name = apart(a["gradients"], b["gradients"])
        if turned and k < len(turned.sums):
            allowed = max(allowed, GROWTH * apart(a["gradients"], turned.sums[k]["gradients"])[0])
        if not off <= allowed:
            yield cause_of_gradient(one, many, k, name, said)
            return
        allowed = max(limit, GROWTH * off)
    if len(one.steps) != len(many.steps) and one.how == many.how == "ended":
        what = f"{len(many.steps)} steps with {many.processes} processes, {len(one.steps)} with one"
        yield Finding("other steps", what)


def of_rates(one, many, k, said):
    """Return what is wrong with the learning rates of a step."""
    alone, together = one.steps[k][0], many.steps[k][0]
    pairs = list(zip(alone["rates"], together["rates"], strict=False))
    if not any(distance(a, b) > 1e-6 for a, b in pairs):
        return None
    what = said.format(f"in step {k + 1} ", *next(pair for pair in pairs if distance(*pair) > 1e-6))
    if k and together["scheduled"] == many.processes * alone["scheduled"] > 0:
        return Finding("scheduler steps once per process", what)
    return Finding("learning rate changes", what)


def cause_of_gradient(one, many, k, name, said) -> Finding:
    """Name the cause of another gradient in step k."""
    norms = [norm(world.sums[k]["gradients"]) for world in (one, many)]
    what = said.format(f"in step {k + 1} the norm is ", *norms)
    if k and (changed := apart(one.sums[k]["weights"], many.sums[k]["weights"]))[0] > 10 * tolerance(one, many):
        return Finding("another update", f"{what}; step {k} has changed {changed[1]} in another way")
    ratio, module = norms[1] / max(norms[0], 1e-12), first_module(one, many)
    if module:
        place, kind, batch_norm = module
        what += f"; the first module that returns something else for the same row is {place} ({kind})"
        return Finding("BatchNorm of each rank" if batch_norm else "module over the batch", what)
    if cut := many.names("no gradient"):
        return Finding("gathered without gradient", f"{what}; {shown(sorted(cut))} of a tensor that wants a gradient")
    if distance(ratio, len(many.replicas)) < 0.01:
        return Finding("gradients summed", what)
    if distance(ratio, 1 / len(many.replicas)) < 0.01:
        return Finding("gradients divided twice", what)
    # over how many targets each part of the step takes its mean: of each rank, of each part of a batch
    terms = [[part["terms"] for rank in world.replicas for part in rank.steps[k]["parts"]] for world in (one, many)]
    if any(len(set(of_world)) > 1 for of_world in terms):
        return Finding("mean of means", f"{what}; the parts have {terms[1]} terms")
    modules = {note["module"] for note in many.ranks[0].of("output")}
    same = f"; all {len(modules)} modules return the same for the same rows" if modules else ""
    return Finding("another gradient", f"{what}, most of all of {name}{same}: cause unknown")


def returned(world) -> dict:
    """Return for each module and row what it was given and what it returned, and the class of the module."""
    found = {}
    for rank in world.ranks:
        for note in rank.of("output"):
            given = note["given"] or [[0.0, 0.0]] * len(note["rows"])
            for row, taken, gave in zip(note["rows"], given, note["returned"], strict=False):
                found.setdefault((note["module"], row), (taken, gave, note["type"]))
    return found


def first_module(one, many):
    """Return name and class of the first module that returns something else for an equal row in the first step."""
    alone, together = returned(one), returned(many)
    limit = 5 * tolerance(one, many)
    for key in alone:
        if key in together:
            (taken, gave, kind), (taken_too, gave_too, _) = alone[key], together[key]
            if near(taken, taken_too, limit / 10) and not near(gave, gave_too, limit):
                return key[0] or "the model", kind, "BatchNorm" in kind
    return None


def near(a, b, limit) -> bool:
    """Whether two rows have the same norm and projection."""
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= limit * max(a[0], b[0], 1e-6)

"""Compares what one process does with what several do, and names the first causes of a difference."""

import math
from collections import Counter

from mpdemo.same.findings import Finding

TOLERANCE = {"bfloat16": 3e-2, "float16": 5e-3}  # relative, of a norm; of other dtypes 1e-4
SAME_WORLD = 1e-5  # between ranks, which got the same averaged gradient


def distance(a, b) -> float:
    """Return the relative difference of two numbers."""
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def tolerance(*worlds) -> float:
    """Return what rounding may change, by the least precise dtype seen."""
    return max(TOLERANCE.get(name, 1e-4) for world in worlds for name in world.names("dtype") | {"float32"})


def of_data(one, many):
    """Yield what is wrong with the samples that the ranks draw; each epoch's order is known whole."""
    trained = {step["number"] for step in many.steps}
    passes = [[note for note in rank.passes(many.loader) if note["number"] in trained] for rank in many.replicas]
    if many.loader is None or not all(passes):
        return
    count = len(passes)
    orders = [sum(of_rank[0]["samples"], []) for of_rank in passes]
    repeated = any(len(p) > 1 and p[0]["batches"] == p[1]["batches"] for p in passes)
    order = sum(passes[0][0]["batches"], [])
    if repeated and order != sorted(order, key=lambda number: (isinstance(number, str), number)):
        yield Finding("no set_epoch", "two epochs have the same shuffled order")
    if count == 1:
        return
    times = Counter(sample for drawn in orders for sample in set(drawn))
    twice = sum(number > 1 for number in times.values())
    replaced = len(set(orders[0])) < len(orders[0])
    if all(sorted(drawn, key=str) == sorted(orders[0], key=str) for drawn in orders):
        yield Finding("no sampler", f"all {count} ranks train on the same {len(orders[0])} samples")
    elif twice > count and not replaced:
        what = f"{twice} of the {len(times)} samples of an epoch are trained on in two ranks or more"
        yield Finding("another order per rank", what)
    lengths = [len(of_rank[0]["batches"]) for of_rank in passes]
    if len(set(lengths)) > 1:
        yield Finding("unequal steps", f"an epoch has {lengths} batches in the ranks; the last steps hang")
    size, together = ([len(step) for step in in_steps(world)[:1]] for world in (one, many))
    if size != together and size:
        what = f"a step of {many.processes} processes has {together[0]} samples, of one {size[0]}"
        yield Finding("batch not divided", what)
    if leaks := leaked(many) if not leaked(one) else 0:
        what = f"{leaks} samples are trained on in one rank and validated on in another"
        yield Finding("trained and validated", what)


def parts_of(world) -> int:
    """Return how many batches a step has."""
    known = [0, *(step["taken"] for step in world.steps if step["number"] == world.steps[0]["number"])]
    return max(1, *(b - a for a, b in zip(known[1:], known[2:], strict=False)), known[1] if len(known) == 2 else 1)


def in_steps(world) -> list:
    """Return the samples of each step."""
    parts, passes = parts_of(world), world.batches()
    taken = [(step["number"] - 1, step["taken"]) for step in world.steps if step["loader"] == world.loader]
    return [sum(passes[k][max(0, end - parts) : end], []) for k, end in taken if k < len(passes)]


def leaked(world) -> int:
    """Return how many samples of an epoch are used for training and for validation."""
    drawn = {True: set(), False: set()}
    for rank in world.replicas:
        for note in rank.of("pass"):
            drawn[note["loader"] == world.loader] |= {(note["root"], str(k)) for b in note["samples"] for k in b}
    return len(drawn[True] & drawn[False])


def of_model(many):
    """Yield what is wrong with the model and its optimizer, whatever the number of processes."""
    if broken := [k for k, step in enumerate(many.steps, 1) if not math.isfinite(step["gradient"])]:
        yield Finding("not finite", f"the gradient of step {broken[0]} is {many.steps[broken[0] - 1]['gradient']}")
        return
    if all(step["gradient"] == 0 for step in many.steps):
        yield Finding("every gradient zero", f"in all {len(many.steps)} steps: nothing is trained")
        return
    for model in many.ranks[0].of("model")[:1]:
        if model["missing"]:
            yield Finding("parameters in no optimizer", shown(model["missing"]))
        if model["unused"]:
            yield Finding("parameters without gradient", shown(model["unused"]))


def shown(names) -> str:
    """Return the first names."""
    return ", ".join(names[:4]) + " ..." * (len(names) > 4)


def of_ranks(many):
    """Yield in what the ranks differ from each other."""
    for steps in zip(*(rank.steps for rank in many.ranks), strict=False):
        first = steps[0]
        if any(distance(step["gradient"], first["gradient"]) > SAME_WORLD for step in steps):
            norms = ", ".join(f"{step['gradient']:.6g}" for step in steps)
            what = f"each rank keeps its own gradient (norms {norms})"
            yield Finding("wrapper bypassed" if many.names("wrapped") else "wrapper missing", what)
            return
        if any(distance(step["mixed"], first["mixed"]) > SAME_WORLD for step in steps):
            norms = ", ".join(f"{step['weights']:.6g}" for step in steps)
            yield Finding("weights differ", f"the ranks have other weights (norms {norms}) at the same gradient")
            return


def of_steps(one, many):
    """Yield the first difference of the steps: samples, ranks and weights are known to be right."""
    limit, starts = tolerance(one, many), [world.ranks[0].of("start") for world in (one, many)]
    for a, b in zip(*starts, strict=False):
        if distance(a["weights"], b["weights"]) > limit:
            what = f"norm {a['weights']:.6g} with one process, {b['weights']:.6g} with {many.processes}"
            yield Finding("first weights differ", what)
            return
    for k, (a, b) in enumerate(zip(one.steps, many.steps, strict=False), 1):
        if any(distance(x, y) > 1e-6 for x, y in zip(a["rates"], b["rates"], strict=False)):
            what = f"in step {k} {a['rates'][0]:.6g} with one process, {b['rates'][0]:.6g} with {many.processes}"
            yield Finding("learning rate changes", what)
            return
        if distance(a["gradient"], b["gradient"]) > limit:
            yield gradient(k, a, b, one, many)
            return
    if len(one.steps) != len(many.steps) and one.how == many.how == "ended":
        what = f"{len(many.steps)} steps with {many.processes} processes, {len(one.steps)} with one"
        yield Finding("other steps", what)


def gradient(k, a, b, one, many) -> Finding:
    """Name the cause of another gradient in step k."""
    ratio, count = b["gradient"] / max(a["gradient"], 1e-12), len(many.replicas)
    what = f"in step {k} the norm is {a['gradient']:.6g} with one process, {b['gradient']:.6g} with {many.processes}"
    if distance(ratio, count) < 0.01:
        return Finding("gradients summed", what)
    if distance(ratio, 1 / count) < 0.01:
        return Finding("gradients divided twice", what)
    if len(set(terms(k, one))) > 1 or len(set(terms(k, many))) > 1:
        return Finding("mean of means", f"{what}; the parts have {terms(k, many)} terms")
    return Finding("another gradient", what if one.loader is not None else f"{what}, on samples that were not seen")


def terms(k, world) -> list:
    """Return over how many targets each part of step k takes its mean: of each rank, of each part of a batch."""
    return [part["terms"] for rank in world.replicas for part in rank.steps[k - 1]["parts"]]


def of_messages(many):
    """Yield whether accumulation sends gradients with every part although the last would do."""
    steps = [step["parts"] for step in many.steps if len(step["parts"]) > 1 and parts_of(many) > 1]
    if not steps or len(many.replicas) == 1:
        return
    sent = [[{name: n for name, n in part["calls"].items() if "reduce" in name} for part in parts] for parts in steps]
    every = all(part["synced"] for parts in steps for part in parts)
    if every or all(parts[0] and all(part == parts[0] for part in parts) for parts in sent):
        how = "DDP averages" if every else f"{sum(sent[0][0].values())} messages are sent"
        yield Finding("accumulation saves nothing", f"{how} in each of the {len(steps[0])} parts of a step")


def of_files(many):
    """Yield what several ranks write."""
    times = Counter(name for rank in many.ranks for name in set(rank.names("file")))
    if twice := sorted(name for name, number in times.items() if number > 1):
        yield Finding("same file from every rank", shown(twice))


def of_log(one, many):
    """Yield whether what is printed differs although the training is the same."""
    for (name, a, half), (other, b, _) in zip(one.ranks[0].printed(), many.ranks[0].printed(), strict=False):
        if name == other and abs(a - b) > 2 * half and distance(a, b) > tolerance(one, many):
            sizes = {len(b) for rank in many.replicas for note in rank.passes(many.loader) for b in note["batches"]}
            what = f"{name} {a:g} is printed with one process, {b:g} with {many.processes}"
            unequal = len(sizes) > 1 and distance(a, b) < 0.01
            summed = distance(b, a * len(many.replicas)) < 0.01
            yield Finding("mean of means" if unequal else "loss summed" if summed else "loss of one rank", what)
            return


def replay_of(one, many) -> dict | None:
    """Return the batches of several processes if one process draws others, for it to draw them."""
    steps = zip(in_steps(one), in_steps(many), strict=False)
    if all(sorted(own, key=str) == sorted(drawn, key=str) for own, drawn in steps):
        return None
    return {str(one.loader): many.batches()}

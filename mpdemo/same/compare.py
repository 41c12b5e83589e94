"""Compares what one process does with what several do, and names the first causes of a difference."""

import math
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text())  # what can be found, and its remedy
TOLERANCE = {"bfloat16": 3e-2, "float16": 5e-3}  # relative, of a norm; of other dtypes 1e-4
SAME_WORLD = 1e-5  # between ranks, which got the same averaged gradient


@dataclass
class Finding:
    """One thing that is not as it should be."""

    name: str
    what: str

    def record(self) -> dict:
        """Return it for the JSON file."""
        return asdict(self) | TABLE[self.name]

    def __str__(self):
        return "  {name}: {what}\n    Remedy: {remedy} ({section})".format(**self.record())


def distance(a, b) -> float:
    """Return the relative difference of two numbers."""
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def differ(a, b, limit, *names) -> bool:
    """Whether one of some values of two notes differs by more than a relative limit."""
    pairs = [(a[name], b[name]) for name in names]
    flat = [pair for x, y in pairs for pair in (zip(x, y, strict=False) if isinstance(x, list) else [(x, y)])]
    return any(distance(x, y) > limit for x, y in flat)


def tolerance(*worlds) -> float:
    """Return what rounding may change, by the least precise dtype seen."""
    return max(TOLERANCE.get(name, 1e-4) for world in worlds for name in world.names("dtype") | {"float32"})


def of_data(one, many):
    """Yield what is wrong with the samples that the ranks draw; each epoch's order is known whole."""
    trained = {step["number"] for step in many.steps}
    passes = [[note for note in rank.passes(many.loader) if note["number"] in trained] for rank in many.replicas]
    if many.loader is None or not all(passes):
        return
    count, lengths = len(passes), [len(of_rank[0]["batches"]) for of_rank in passes]
    repeated = any(len(p) > 1 and p[0]["batches"] == p[1]["batches"] for p in passes)
    order = sum(passes[0][0]["batches"], [])
    if repeated and order != sorted(order, key=lambda number: (isinstance(number, str), number)):
        yield Finding("no set_epoch", "two epochs have the same shuffled order")
    if count == 1:
        return
    drawn = [sorted(sum(of_rank[0]["samples"], []), key=str) for of_rank in passes]
    times = Counter(sample for of_rank in drawn for sample in set(of_rank))
    twice, replaced = sum(number > 1 for number in times.values()), len(set(drawn[0])) < len(drawn[0])
    if all(of_rank == drawn[0] for of_rank in drawn):
        yield Finding("no sampler", f"all {count} ranks train on the same {len(drawn[0])} samples")
    elif twice > count and not replaced:
        what = f"{twice} of the {len(times)} samples of an epoch are trained on in two ranks or more"
        yield Finding("another order per rank", what)
    if len(set(lengths)) > 1:
        yield Finding("unequal steps", f"an epoch has {lengths} batches in the ranks; the last steps hang")
    size, together = ([len(step) for step in world.in_steps()[:1]] for world in (one, many))
    if size != together and size:
        what = f"a step of {many.processes} processes has {together[0]} samples, of one {size[0]}"
        yield Finding("batch not divided", what)
    if (leaks := leaked(many)) and not leaked(one):
        what = f"{leaks} samples are trained on in one rank and validated on in another"
        yield Finding("trained and validated", what)


def leaked(world) -> int:
    """Return how many samples are used for both training and validation."""
    drawn = {True: set(), False: set()}
    for note in (note for rank in world.replicas for note in rank.of("pass")):
        drawn[note["loader"] == world.loader] |= {(note["root"], str(k)) for batch in note["samples"] for k in batch}
    return len(drawn[True] & drawn[False])


def of_model(many):
    """Yield what is wrong with the model and its optimizer, whatever the number of processes."""
    if broken := [k for k, step in enumerate(many.steps) if not math.isfinite(step["gradient"])]:
        yield Finding("not finite", f"the gradient of step {broken[0] + 1} is {many.steps[broken[0]]['gradient']}")
    elif all(step["gradient"] == 0 for step in many.steps):
        yield Finding("every gradient zero", f"in all {len(many.steps)} steps: nothing is trained")
    else:
        names = next(iter(many.ranks[0].of("model")), {})
        for kind, name in (("missing", "parameters in no optimizer"), ("unused", "parameters without gradient")):
            if names.get(kind):
                yield Finding(name, shown(names[kind]))


def shown(names) -> str:
    """Return the first names."""
    return ", ".join(names[:4]) + " ..." * (len(names) > 4)


def of_ranks(many):
    """Yield in what the ranks differ from each other."""
    bypassed = "wrapper bypassed" if many.names("wrapped") else "wrapper missing"
    for steps in zip(*(rank.steps for rank in many.ranks), strict=False):
        for value, shown, name, what in (
            ("gradient", "gradient", bypassed, "each rank keeps its own gradient (norms {})"),
            ("mixed", "weights", "weights differ", "the ranks have other weights (norms {}) at the same gradient"),
        ):
            if any(differ(step, steps[0], SAME_WORLD, value) for step in steps):
                yield Finding(name, what.format(", ".join(f"{step[shown]:.6g}" for step in steps)))
                return


def of_steps(one, many):
    """Yield the first difference of the steps: samples, ranks and weights are known to be right."""
    limit, said = tolerance(one, many), "{}{:.6g} with one process, {:.6g} with " + str(many.processes)
    for a, b in zip(one.ranks[0].of("start"), many.ranks[0].of("start"), strict=False):
        if differ(a, b, limit, "weights"):
            yield Finding("first weights differ", said.format("norm ", a["weights"], b["weights"]))
            return
    for k, (a, b) in enumerate(zip(one.steps, many.steps, strict=False)):
        if differ(a, b, 1e-6, "rates"):
            yield Finding("learning rate changes", said.format(f"in step {k + 1} ", a["rates"][0], b["rates"][0]))
            return
        if differ(a, b, limit, "gradient"):
            what = said.format(f"in step {k + 1} the norm is ", a["gradient"], b["gradient"])
            yield cause_of_gradient(b["gradient"] / max(a["gradient"], 1e-12), what, k, one, many)
            return
    if len(one.steps) != len(many.steps) and one.how == many.how == "ended":
        what = f"{len(many.steps)} steps with {many.processes} processes, {len(one.steps)} with one"
        yield Finding("other steps", what)


def cause_of_gradient(ratio, what, k, one, many) -> Finding:
    """Name the cause of another gradient in step k."""
    if distance(ratio, len(many.replicas)) < 0.01:
        return Finding("gradients summed", what)
    if distance(ratio, 1 / len(many.replicas)) < 0.01:
        return Finding("gradients divided twice", what)
    # over how many targets each part of the step takes its mean: of each rank, of each part of a batch
    terms = [[part["terms"] for rank in world.replicas for part in rank.steps[k]["parts"]] for world in (one, many)]
    if any(len(set(of_world)) > 1 for of_world in terms):
        return Finding("mean of means", f"{what}; the parts have {terms[1]} terms")
    return Finding("another gradient", what if one.loader is not None else f"{what}, on samples that were not seen")


def of_messages(many):
    """Yield whether accumulation sends gradients with every part although the last would do."""
    steps = [step["parts"] for step in many.steps if len(step["parts"]) > 1]
    if not steps or many.parts() == 1 or len(many.replicas) == 1:
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

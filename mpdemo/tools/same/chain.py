"""The chain of a training step: weights -> rows -> each rank's own gradient -> the gradient that is used -> weights.

N ranks are the same training as one process if each link is what one process has on the same rows. N ranks run first;
one process then begins each step with their weights, so that no difference is carried to the next step, and none grows.
Each link is asked one question: which linear combination of the ranks' own values is it (`fit`)? The first link that
breaks, and the combination that it is instead, name the fault; the call that ran names the line.
"""

from mpdemo.tools.same import inside, shares
from mpdemo.tools.same.finding import Finding, apart, distance, fit, less, norm, numbers, shown, tolerance

REST = 3e-3  # of a gradient may be left where it is a combination of others
EVEN = 0.01  # relative: weights of ranks that count alike
GROWTH = 10.0  # of rounding, from step to step, where weights were too large to be kept


def first_break(one, many, compared) -> Finding | None:
    """Return the first link that breaks, among the ranks and, where the rows are the same, beside one process."""
    allowed, both = tolerance(one, many), inside.steps_of(one, many)
    for k in range(len(many.steps)):
        for link in (passes, weights, used, rates):
            if found := link(many, k):
                return found
        if k not in both:
            continue
        off, name = off_at(one, many, k)
        alike = not compared or off <= allowed
        # only where it isn't one process's, it matters how it is made of the ranks' own
        found = not alike and mean(one, many, k) or before(one, many, k)
        if compared and not found:
            found = after(one, many, k) if alike else cause(one, many, k, name)
        if found:
            return found
        if many.kept <= k or many.cut:
            allowed = max(tolerance(one, many), GROWTH * off)
    return None


def agrees(one, many) -> bool:
    """Whether both use the same gradients, or make the same weights of them, whatever the rows are."""
    both, allowed = inside.steps_of(one, many), tolerance(one, many)
    return bool(both) and all(off_at(one, many, k)[0] <= allowed for k in both)


def off_at(one, many, k) -> tuple:
    """Return how far the gradient that is used in a step is from one process's, and the parameter that is farthest.

    None is where only the weights after the step have to be the same, and are.
    """
    if many.settled(k) or many.searched(k) and not after(one, many, k):
        return 0.0, ""
    return apart(one.sums[k]["gradients"], many.sums[k]["gradients"])


def weights(many, k):
    """Return whether the ranks begin a step with other weights, although they used the same gradient before."""
    if not (names := many.differing(k, "weights")):
        return None
    averages = many.names("wrapped") or shares.reduced_by_hand(many)
    if not averages and (found := used(many, k)):
        return found
    norms = numbers(norm(rank["weights"]) for rank in many.steps[k])
    what = f"before step {k + 1} the ranks have other values of {shown(names)} (norms of all {norms})"
    what += "; in the step before they used the same gradient" * bool(k)
    line = many.steps[k][0]["lines"].get("weights") or many.steps[max(k - 1, 0)][0]["where"]
    return Finding("weights differ", what, line)


def passes(many, k):
    """Return whether a rank goes back more often than another before a step, or is at another batch."""
    ranks = [rank.steps[k] for rank in many.replicas]
    counts, drawn = [rank["backwards"] for rank in ranks], [rank["taken"] for rank in ranks]
    if len(set(counts)) > 1:
        what = f"rank {counts.index(max(counts))} has made {k + 1} steps after {max(counts)} backward passes, another"
        return Finding(
            "a rank skips", f"{what} after {min(counts)}: a batch or a step is left out", ranks[0]["where"]
        )
    places = {(rank["loader"], rank["number"]) for rank in ranks}
    one_pass = len(places) == 1 and ranks[0]["loader"] is not None
    if one_pass and len(set(drawn)) > 1 and all(len(rank["parts"]) == 1 for rank in ranks):
        said = ", ".join(f"rank {rank} with its batch {number}" for rank, number in enumerate(drawn))
        return Finding("a rank skips", f"step {k + 1} is made by {said} of an epoch", ranks[0]["where"])
    return None


def used(many, k):
    """Return why the ranks use gradients of their own in a step."""
    ranks, names = many.steps[k], many.differing(k, "gradients")
    if not names or many.settled(k):
        return None
    wraps, line, step = many.names("wrapped"), many.line_of(k), ranks[0]
    norms = numbers(norm(rank["gradients"]) for rank in ranks)
    what = f"in step {k + 1} each rank uses a gradient of its own (norms {norms})"
    if size := many.names("part of the ranks"):
        what += f": the wrapper averages over {size.pop()} of {len(ranks)} ranks"
        return Finding("mesh without reduction", what, line)
    if not set(many.differing(k, "averaged")) & set(names) and (scaled := scale_of_rank(many, k)):
        return scaled
    if many.cut and len(many.replicas) < len(ranks):
        return Finding("whole parameters differ", f"{what} of {shown(names)}, which each holds whole", line)
    sent = shares.reductions(step["parts"])
    no_sync = many.ranks[0].first("no_sync")
    if "DDP" in wraps and step["entered"] and sent and not sent[-1] and (any(sent) or no_sync):
        when = f"in microbatch {', '.join(str(n) for n, x in enumerate(sent, 1) if x) or 'none'} of {len(sent)}"
        what += f": DDP averages {when}, and not with the last backward pass before the step"
        return Finding("no_sync at the wrong part", what, no_sync or line)
    if step["early"]:
        what += ": the step lies inside the backward pass, before the average"
        return Finding("step before the average", what, step["where"])
    if "DDP" in wraps and (found := outside(many, names, what)):
        return found
    if wraps and len(names) < len(step["gradients"]):
        return Finding("parameters outside the wrapper", f"{what} of {shown(names)}", line)
    if by_hand := shares.reduced_by_hand(many):
        what += f" of {shown(names)}, although the script reduces tensors by itself ({by_hand})"
        return Finding("gradient is no mean", what, by_hand)
    if not wraps:
        return Finding("wrapper missing", what, line)
    if not step["entered"]:
        inner = [note["where"] for note in many.ranks[0].of("called") if not note["wrapper"]]
        return Finding("wrapper bypassed", what, inner[-1] if inner else line)
    what += ", although the wrapper's forward was called"
    if not any(sent):
        what += "; nothing was sent while it went back, as with torch.autograd.grad"
        line = [line, *many.ranks[0].names("grad at")][-1]
    return Finding("gradient is no mean", what, line)


def outside(many, names, what):
    """Return which parameters DDP never averages, and why."""
    out, built = [note["outside"] for note in many.ranks[0].of("model")], many.ranks[0].names("wrapped at")
    if not out or not set(names) <= out[-1].keys():
        return None
    what += f" of {shown(names)}"
    if all(out[-1][name] for name in names):
        what += ": they wanted no gradient when DDP was built, and DDP doesn't know them"
        return Finding("unfrozen after wrapping", what, built[-1])
    called = {note["number"]: note["where"] for note in many.ranks[0].of("called") if not note["wrapper"]}
    owners = {int(name.partition(":")[0]) if ":" in name else 0 for name in names}
    if len(owners) == 1 and (where := called.get(owners.pop())):
        what += ", of a module that is called without a wrapper"
        return Finding("second module not wrapped", what, where)
    return Finding("parameters outside the wrapper", f"{what}, which DDP was not given", built[-1])


def scale_of_rank(many, k, changes=(), least=1e-4):
    """Return whether what each rank uses, or changes, is the average times a number of its own."""
    made = changes or [rank["gradients"] for rank in many.steps[k]]
    found = [fit(of_rank, [rank["averaged"]]) for of_rank, rank in zip(made, many.steps[k], strict=True)]
    times = [weight[0] for weight, rest in found if weight and rest < REST]
    if len(times) < len(found) or max(times) - min(times) <= least * max(map(abs, times)):
        return None
    what = f"in step {k + 1} the ranks take {numbers(times)} times the averaged gradient, each a number of its own"
    return Finding("gradient scaled or clipped per rank", what, many.steps[k][0]["where"])


def rates(many, k):
    """Return whether the ranks have other learning rates in a step."""
    found = [rank["rates"] for rank in many.steps[k]]
    if len({tuple(of_rank) for of_rank in found if len(of_rank) == len(found[0])}) < 2:
        return None
    what = f"in step {k + 1} the ranks have {numbers(of_rank[0] for of_rank in found)}"
    return Finding("learning rates differ", what, many.steps[k][0]["where"])


def mean(one, many, k):
    """Return whether what is used is no combination of the ranks' own gradients in which all count alike, or a sum."""
    kind = "gradients" if many.differing(k, "averaged") else "averaged"  # those may be clipped by now
    line = many.ranks[0].first("hook") or many.line_of(k)
    count, rest, times = made_of(one, many, k, kind)
    if not count:
        return None
    if rest > tolerance(many) or max(count) - min(count) > EVEN * max(map(abs, count)):
        what = f"in step {k + 1} the ranks' own gradients count {numbers(count)} in what is used; {rest:.2g} is left"
        compressed = "gradients compressed" if many.names("hook") else "gradient is no mean"
        return scale_of_rank(many, k) or Finding(compressed, what, line)
    what = f"in step {k + 1} the gradient is {times:.4g} times the mean of the ranks' own"
    return Finding(known, what, line) if (known := multiple(times, many)) else None


def made_of(one, many, k, kind) -> tuple:
    """Return how much each rank's own gradient counts in a step's, what is left, and how often their mean was taken."""
    used, of_one, alone = many.sums[k][kind], one.sums[k][kind], one.own(k)
    once, left = fit(of_one, alone)
    if once and left > REST:  # one process adds something, too, such as a weight decay by hand
        used, once = less(used, less(of_one, alone[0])), [1.0]
    arrived = {name for of_rank in many.own(k) for name in of_rank}
    count, rest = fit({name: row for name, row in used.items() if name in arrived}, many.own(k))
    return count, rest, sum(count) / (sum(once) if once else 1.0)


def multiple(times, many) -> str:
    """Return the name of what makes gradients so many times as large, if it is the number of replicas."""
    count = len(many.replicas)
    names = {"gradients summed": count, "gradients divided twice": 1 / count} if count > 1 else {}
    return next((name for name, expected in names.items() if distance(times, expected) < EVEN), "")


def before(one, many, k):
    """Return whether one process has other first weights, another model, or other learning rates."""
    a, b = one.steps[k][0], many.steps[k][0]
    said = "{:.6g} with one process, {:.6g} with " + str(many.processes)
    if k == 0:
        if (tied := one.tied) != many.tied:
            what = f"one process shares {tied or 'no parameters'}, {many.processes} share {many.tied or 'none'}"
            return Finding("another model", what)
        start = one.sums[0]["weights"], many.sums[0]["weights"]
        if apart(*start)[0] > tolerance(one, many):
            return Finding("first weights differ", "norm " + said.format(*map(norm, start)))
    pairs = [pair for pair in zip(a["rates"], b["rates"], strict=False) if distance(*pair) > 1e-6]
    if not pairs:
        return None
    what = f"in step {k + 1} " + said.format(*pairs[0])
    lines = many.ranks[0].names("scheduler at") or [""]  # where it is made, and where it steps
    if k and b["scheduled"] == many.processes * a["scheduled"] > 0:
        return Finding("scheduler steps once per process", what, lines[-1])
    return Finding("learning rate changes", what, lines[0])


def after(one, many, k):
    """Return whether a step makes other weights of the same gradient."""
    if k + 1 not in inside.steps_of(one, many) or many.differing(k + 1, "weights"):
        return None
    steps = zip(many.steps[k], many.steps[k + 1], strict=True)
    changes = [less(later["weights"], rank["weights"]) for rank, later in steps]
    if found := scale_of_rank(many, k, changes, EVEN):
        return found
    gradients = one.sums[k]["gradients"]
    large = {name for name, row in gradients.items() if row[0] ** 0.5 > 1e-3 * norm(gradients)}
    a, b = ({n: row for n, row in w.sums[k + 1]["weights"].items() if n in large} for w in (one, many))
    off, name = apart(a, b)
    if not off > 10 * tolerance(one, many):
        return None
    what = f"step {k + 1} begins with the same weights and uses the same gradient, and changes {name} in another way"
    line = many.steps[k][0]["where"]
    return state_of_rank(one, many, k + 1, what, line) or Finding("another update", what, line)


def state_of_rank(one, many, k, what, line):
    """Return whether a rank keeps something that differs from the others' or from one process's before a step."""
    if not (names := inside.other_state(one, many, k)):
        return None
    what += f"; {shown(names)} have other values in a rank than with one process"
    return Finding("state of each rank", what, many.steps[k][0]["lines"].get(names[0]) or line)


def cause(one, many, k, name):
    """Name what makes another gradient on equal rows, by the combination that it is of others."""
    a, b, line, own = one.sums[k], many.sums[k], many.line_of(k), many.own(k)
    what = f"in step {k + 1} the norm of the gradient is {norm(a['gradients']):.6g} with one process, "
    what += f"{norm(b['gradients']):.6g} with {many.processes}"
    same = apart(a["local"], b["local"])[0] <= tolerance(one, many)  # what the ranks compute themselves
    ranks = one.steps[k][0], *(rank.steps[k] for rank in many.replicas)
    losses = [[part["loss"] for part in rank["parts"]] for rank in ranks]
    if cut := inside.cut_off(one, many):
        what = f"with {many.processes} processes the gradient of {shown(cut)} is exactly 0 or None in all steps"
        return Finding("gradient cut off", f"{what}, and with one it is not: nothing is learned there")
    if not same and many.steps[k][0]["sent"] and inside.agree(*losses):
        what += "; the losses are those of one process, and the gradient isn't: it is cut between the ranks"
        return Finding("gathered without gradient", what, many.steps[k][0]["sent"])
    times, rest = fit(b["gradients"], [a["gradients"]])
    if times and rest < REST and (known := multiple(times[0], many)):
        return Finding(known, f"{what}: {times[0]:.4g} times as large", line)
    to, left = fit(a["local"], own)
    if same or times and rest < REST:
        by = [fit(sums["gradients"], [sums["local"]])[0] or [0.0] for sums in (a, b)]
        what += f"; before it is scaled or clipped it is the same, and multiplied by {numbers(sum(by, []))} then"
        return scale_of_rank(many, k) or Finding("gradient scaled", what, many.steps[k][0]["where"])
    if untrained := inside.other_untrained(one, many):
        what += f"; {shown(untrained)}, which nothing trains, have other values in some rank than with one process"
        return Finding("untrained weights differ", what, line)
    if module := not many.cut and inside.first_module(one, many):
        what += f"; the first module that returns something else for the same row is {module[1]}"
        return Finding(module[0], what, line)
    if to and left < REST and max(to) - min(to) > EVEN * max(map(abs, to)):
        what += f"; with one process the ranks' gradients count {numbers(to)}, and all the same here"
        return Finding("mean of means", what, line)
    if state := state_of_rank(one, many, k, what, line):
        return state
    what += f", most of all of {name}; no combination of the ranks' gradients is that of one process"
    if k:
        return Finding(
            "state of each rank", f"{what}, as in each step before: what the ranks keep differs", line
        )
    return Finding("loss over the batch", what, many.steps[k][0]["sent"] or line)

"""Runs a script with one process and with several, and says whether it is the same training, and what differs."""

import statistics

from mpdemo.errors import one_line
from mpdemo.tools.same import compare, held, steps
from mpdemo.tools.same.compare import of_log, unequal
from mpdemo.tools.same.failures import of_failure
from mpdemo.tools.same.finding import BY_NATURE, GIVEN, VERDICTS, Finding, apart, norm
from mpdemo.tools.same.worlds import refuse

LONGEST = 8  # epochs at most in which the ranks are compared with each other


class Comparison:
    """Two worlds, what is found between them, and whether they were compared on the same rows."""

    def __init__(self, watcher, one, many, without):
        self.watcher, self.one, self.many, self.without = watcher, one, many, set(without)
        self.findings, self.notes = [], []
        # what one process was given of the several: the order of the samples, or the rows themselves
        self.order = ""
        self.compared = False
        self.reason = incomparable(one, many)  # why nothing can be said
        if not self.reason:
            self.compare()
        for finding in self.findings:
            finding.where = finding.where or place_of(many, finding)

    def compare(self):
        """Look at the data, at the ranks of the larger world, and then at the steps of both."""
        one, many = self.one, self.many
        many.turn(one)
        if alone := compare.not_distributed(many):
            self.findings.append(alone)
            return
        self.findings += compare.of_data(one, many)
        if failed := of_failure(many):
            self.findings = self.findings or [failed]
            return
        ranks = [*filter(None, [steps.of_ranks(one, many)])]
        scaled = ranks if ranks and ranks[0].name in steps.SCALED else []
        self.findings += [*compare.of_model(one, many), *(scaled or ranks)]
        if all(finding.has("beside") for finding in self.findings if finding not in scaled):
            self.give_same_rows()
            found = [*self.of_both()]
            # the loss is a sum, and the script divides its gradient later
            if scaled and self.compared and not found:
                self.findings.remove(*scaled)
            self.findings += [] if scaled else found
        self.findings += [*compare.of_messages(many), *compare.of_files(many)]

    def give_same_rows(self):
        """Where one process draws other samples, run it again on those of the several."""
        one, many = self.one, self.many
        given, kept = {}, [str(rank.kept) for rank in many.replicas if rank.kept.exists()]
        if unequal(one.in_samples, many.in_samples):
            self.order, given = "order", {"replay": {str(one.loader): many.batches()}}
        elif many.has_other_rows(one) and kept:
            self.order, given = "rows", {"rows": kept}
        if given:
            self.one = self.watcher.run_new(one.processes, without=self.without, **given)

    def of_both(self) -> list:
        """Return what differs in the steps of both worlds; of other rows, only what does not depend on them."""
        one, many = self.one, self.many
        if one.error or not one.steps:
            self.reason = f"on the rows of {many.processes} processes one fails: {one.error}"
            return []
        seen = any(one.in_rows) and any(many.in_rows)
        same = seen and not many.has_other_rows(one)
        numbered = many.in_samples and not unequal(one.in_samples, many.in_samples)
        found = steps.of_steps(one, many)
        if (
            found
            and found.has("rounding")
            and one.loader is not None
            and chance_of(one, many) <= self.without
        ):
            found = steps.of_steps(one, many, self.turned())
            if not found:
                self.compared = True
                self.notes.append(
                    f"rounding grows: {one} with the samples of a batch in another order differs as much"
                )
                return []  # nor can printed losses be compared
        of_gradients = found and found.has("chance")
        self.compared = bool(same or numbered and not chance_of(one, many) or not of_gradients)
        if self.compared:
            return (
                [found]
                if found
                else [*held.of_state(one, many), *held.of_saved(one, many), *of_log(one, many)]
            )
        what = "the rows are not the same in both" if seen else "no rows seen that enter a model"
        self.notes.append(f"{what}: the gradients of the two are not compared")
        if not seen:
            self.reason = what
        return of_other_rows(one, many)

    def turned(self):
        """Run one process on the same batches, the samples of each in the reverse order."""
        drawn = (self.many if self.order == "order" else self.one).batches()
        batches = [[batch[::-1] for batch in batches] for batches in drawn]
        return self.watcher.run_new(
            self.one.processes, without=self.without, replay={str(self.one.loader): batches}
        )


def place_of(many, finding) -> str:
    """Return the line where the loader or the optimizer is made that a finding is about."""
    first = many.ranks[0]
    places = {"S1": [note["line"] for note in first.passes(many.loader)], "S3": first.names("optimizer at")}
    return next(iter(places.get(finding.record()["code"][:2], [])), "")


def incomparable(one, many) -> str:
    """Return why two worlds have nothing that could be compared, or an empty text."""
    if not one.steps:
        return "no step of an optimizer of torch.optim is seen"
    shapes = [
        {k: v for note in world.ranks[0].of("start") for k, v in note["shapes"].items()}
        for world in (one, many)
    ]
    other = [name for name in shapes[0] if name in shapes[1] and shapes[0][name] != shapes[1][name]]
    if other:
        return f"the script splits its model itself: {compare.shown(other)} have other shapes with {many.processes}"
    return ""


def of_other_rows(one, many) -> list:
    """Return what can be said of gradients on rows that are not the same: whether they are N times as large."""
    pairs = list(zip(one.sums, many.sums, strict=False))
    ratios = [norm(b["gradients"]) / max(norm(a["gradients"]), 1e-12) for a, b in pairs]
    ratio = statistics.median(ratios)
    name = steps.multiple(ratio, many, near=0.15)
    what = f"the gradients are {ratio:.3g} times as large as those of one process"
    return [Finding(name, what)] if name and max(ratios) < 1.5 * min(ratios) else []


def verdicts_of(watcher, counts) -> list:
    """Run the script with each number of processes, then with the first; compare."""
    without = watcher.args.without
    several = [watcher.run_new(count, without=without, longest=LONGEST) for count in counts[1:]]
    one = watcher.run_new(counts[0], without=without)
    if watcher.args.device and not one.error and not one.steps and not one.names("spawn"):
        watcher.devices = max(counts)  # some scripts end at once where they don't see two GPUs
        one = watcher.run_new(counts[0], without=without)
    refuse(one)
    return [verdict(watcher, one, many) for many in several]


def verdict(watcher, one, many) -> dict:
    """Compare two worlds; what differs by nature is switched off on a second try."""
    found = Comparison(watcher, one, many, watcher.args.without)
    chance, notes = chance_of(one, many) - found.without, []
    drawn = {name: compare.of_chance(one, many, name) for name in sorted(chance)}
    serious = any(not (f.has("chance") or f.has("beside") or f.has("note")) for f in found.findings)
    differs = not found.compared or any(finding.has("chance") for finding in found.findings)
    if chance and differs and not serious and not found.reason:
        without = found.without | chance
        one, many = (
            watcher.run_new(n, without=without, record=True) for n in (one.processes, many.processes)
        )
        found = Comparison(watcher, one, many, without)
        chance -= {"draws"} - chance_of(one, many)  # they were those of dropout
        own = {name: ": each rank draws its own" * (drawn[name] is True) for name in sorted(chance)}
        notes = [f"{BY_NATURE[name]}{own[name]}; switched off for the comparison" for name in own]
    found.findings += [alike for alike in drawn.values() if isinstance(alike, Finding)]
    return judged(found, notes, watcher.args.strict)


def chance_of(one, many) -> set:
    """Return what random numbers were seen for, as --without names it."""
    return one.names("chance") | many.names("chance")


def judged(found, notes, strict) -> dict:
    """Return the verdict of a comparison."""
    one, many = found.one, found.many
    harmless = [finding for finding in found.findings if finding.has("note") and not strict]
    findings = [finding for finding in found.findings if finding not in harmless]
    given = GIVEN.get(found.order)
    if given:
        notes.append(given[0].format(one=one, many=many.processes))
    seen = found.compared or any(steps.factor(sums)[0] is not None for sums in many.sums)
    kind = "not the same" if findings else "same" if seen and not found.reason else "cannot tell"
    said = VERDICTS[kind]["said"]
    if kind == "same" and given and found.compared:
        said += given[1]
    if found.reason:
        notes.append(f"nothing to compare: {found.reason}")
    notes += found.notes + [
        f"{name} is computed by all-reduces on CPUs" for name in sorted(many.names("emulated"))
    ]
    if kind != "not the same" and (left := not_examined(one, many)):
        notes.append(f"not examined: {left}")
    record = {
        "processes": many.processes,
        "verdict": kind,
        "said": said,
        "findings": findings,
        "harmless": harmless,
    }
    return record | {"notes": [*map(one_line, notes)], "table": table(one, many)}


def not_examined(one, many) -> str:
    """Return what of the script was not run, or not looked at."""
    found = []
    longest = max((len(note["batches"]) for note in many.ranks[0].passes(many.loader)), default=0)
    if many.loader is not None and longest > one.order["batches"] and not many.names("whole"):
        found.append(f"batches after number {one.order['batches']} of an epoch")
    if one.names("cut"):
        found.append(f"what follows step {ends(one, many)[0]}")
    return ", ".join(found)


def ends(one, many) -> list[int]:
    """Return up to which step each world is told of: how many more epochs it sees depends on the machine's speed."""
    steps = [len(one.steps), len(many.steps)]
    more = [int(step) for step in one.names("more epochs") | many.names("more epochs")]
    return [min(steps + more)] * 2 if more else steps


def table(one, many) -> dict:
    """Return what both worlds did, a row each."""
    told = ends(one, many)
    pairs = list(zip(one.sums[: told[0]], many.sums[: told[1]], strict=False))
    far = max((apart(a["gradients"], b["gradients"])[0] for a, b in pairs), default=None)
    rows = {"processes": [one.processes, many.processes], "steps": told}
    for name, show in {
        "rows per step": lambda world, last: world.in_rows[0].total() or "not seen",
        "first gradient": lambda world, last: f"{norm(world.sums[0]['gradients']):.6g}",
        "last gradient": lambda world, last: f"{norm(world.sums[last]['gradients']):.6g}",
        "last weights": lambda world, last: f"{norm(world.sums[last]['weights']):.6g}",
        "learning rate": rate,
        "messages per step": lambda world, last: messages(world),
    }.items():
        rows[name] = [
            show(world, end - 1) if world.steps else "-"
            for world, end in zip((one, many), told, strict=True)
        ]
    return rows | {"largest difference of a gradient": ["", "-" if far is None else f"{far:.1g}"]}


def rate(world, last) -> str:
    """Return the learning rate of a step."""
    return "by hand" if world.names("by hand") else f"{world.steps[last][0]['rates'][0]:.6g}"


def messages(world) -> str:
    """Return how many collectives a step has; DDP makes its own below Python, where they aren't counted."""
    last = world.steps[-1][0]
    calls, parts = sum(last["calls"].values()), len(last["parts"])
    if not (synced := sum(bool(part["synced"]) for part in last["parts"])):
        return str(calls)
    return f"{calls} + DDP's" + (f" in {synced} of {parts} microbatches" if parts > 1 else "")

"""Runs a script with several processes and with one, and says whether it is the same training, and what differs."""

import functools
import math
from pathlib import Path

from mpdemo.errors import one_line
from mpdemo.tools.same import chain, ends, inside, shares
from mpdemo.tools.same.finding import BY_NATURE, Finding, norm, parted, tolerance
from mpdemo.tools.same.worlds import refuse

ROWS = ["processes", "steps", "rows per step", "first gradient", "last gradient", "last weights"]
ROWS += ["learning rate", "messages per step"]


class Comparison:
    """A world of several and one process that begins each step with its weights, and what is found between them."""

    def __init__(self, watcher, count, many, without):
        self.watcher, self.many, self.without = watcher, many, set(without)
        self.findings, self.compared = [], False
        self.links_only = ""  # why only the ranks are compared with each other
        self.given = False  # whether one process was given the samples of the several
        weights = sorted(map(str, many.notes.glob("*.weights")))
        self.run = functools.partial(watcher.run_new, count, without=self.without, forced=weights)
        self.one = self.run()
        if watcher.args.device and not (self.one.error or self.one.steps):
            # some scripts end at once where they don't see two GPUs
            self.run = functools.partial(self.run, devices=many.processes)
            self.one = self.run()
        self.reason = only_watched(watcher, self.one)
        if not self.reason:
            refuse(self.one)
            many.cut = inside.cut(self.one, many)
            self.reason = incomparable(self.one, many)  # why nothing can be said
            for world in (self.one, many) if many.cut else ():
                world.leave_out(many.cut)
        if not self.reason:
            self.compare()
        elif many.cut and (failed := ends.of_end(many)):
            self.findings = [failed]

    def compare(self):
        """Look at the rows and the ends of the ranks, then follow the chain."""
        one, many = self.one, self.many
        if alone := shares.not_distributed(many):
            self.findings = [alone]
            return
        self.findings += shares.of_data(one, many)
        if failed := ends.of_end(many):
            self.findings = self.findings or [failed]
            if failed.name == "fails with several" and (reason := only_watched(self.watcher, many)):
                self.findings, self.reason = [], reason
            return
        self.findings += shares.of_model(many)
        if all(finding.has("beside") for finding in self.findings):
            self.give_same_rows()
            self.follow()
        self.findings += [*shares.of_messages(many), *shares.of_files(many)]

    def give_same_rows(self):
        """Where one process draws other samples, run it again on those of the several."""
        if shares.unequal(self.one.in_samples, self.many.in_samples):
            self.given = True
            self.one = self.run(replay={str(self.one.loader): self.many.batches()})
            self.one.leave_out(self.many.cut)

    def follow(self):
        """Follow the chain; then, where it holds, compare what is kept, saved and printed."""
        one, many = self.one, self.many
        if one.error or not one.steps:
            self.reason = f"on the rows of {many.processes} processes one fails: {one.error}"
            return
        seen = any(one.in_rows) and any(many.in_rows)
        same = seen and not shares.unequal(one.in_rows, many.in_rows)
        numbered = many.in_samples and not shares.unequal(one.in_samples, many.in_samples)
        self.compared = bool(same or numbered and not chance_of(one, many) & {"augmentation", "draws"})
        found = chain.first_break(one, many, self.compared)
        if self.compared or not found and chain.agrees(one, many):
            self.findings += [found] if found else [*after(one, many)]
            return
        what = "the rows are not the same in both" if seen else "no rows seen that enter a model"
        self.links_only = f"{what}: the ranks are compared with each other, and not with one process"
        self.findings += [found] if found else []


def after(one, many):
    """Yield what differs although the chain holds."""
    if len(one.steps) != len(many.steps) and one.how == many.how == "ended":
        what = f"{len(many.steps)} steps with {many.processes} processes, {len(one.steps)} with one"
        yield Finding("other steps", what, many.steps[-1][0]["where"])
        return
    yield from inside.of_state(one, many)
    yield from inside.of_saved(one, many, limit=10 * tolerance(one, many))
    yield from shares.of_log(one, many)


def only_watched(watcher, world) -> str:
    """Return what is said of a script that fails only while it is watched, or an empty text."""
    if not world.error or world.names("spawn"):
        return ""
    again = watcher.run(world.processes, plain=True, limit=min(20, watcher.args.timeout))
    said = f"the script fails with {world} while it is watched, and not without: {world.error}"
    return "" if again.error else said


def place_of(many, finding) -> str:
    """Return the line where the loader or the optimizer is made that a finding is about."""
    first = many.ranks[0]
    which = "taken_at" if finding.name == "no set_epoch" else "line"
    rows = [*(note[which] for note in first.passes(many.loader)), *first.names("loader at")]
    rows += first.names("seeded at")[-1:] * (finding.name == "no sampler")  # what a loop draws by itself
    rows += [note["where"] for note in first.of("called")]
    return next(
        iter({"S1": rows, "S3": first.names("optimizer at")}.get(finding.record()["code"][:2], [])), ""
    )


def incomparable(one, many) -> str:
    """Return why two worlds have nothing that could be compared, or an empty text."""
    if not one.steps:
        return "no step of an optimizer of torch.optim is seen"
    cut = many.cut and len(many.cut) == len(one.ranks[0].shapes)
    return "no parameter is known to be whole in each rank" if cut else ""


def verdicts_of(watcher, counts) -> list:
    """Run the script with each larger number of processes, and compare each with the first number."""
    without = watcher.args.without
    return [verdict(watcher, counts[0], watcher.run_new(n, without=without)) for n in counts[1:]]


def verdict(watcher, count, many) -> dict:
    """Compare two worlds; what differs by nature is switched off on a second try."""
    found = Comparison(watcher, count, many, watcher.args.without)
    one, chance, notes = found.one, chance_of(found.one, many) - found.without, []
    drawn = {name: shares.of_chance(one, many, name) for name in sorted(chance)}
    serious = any(not (f.has("chance") or f.has("beside") or f.has("note")) for f in found.findings)
    differs = not found.compared or any(finding.has("chance") for finding in found.findings)
    if chance and differs and not serious and not found.reason:
        without = found.without | chance
        many = watcher.run_new(many.processes, without=without)
        found = Comparison(watcher, count, many, without)
        chance -= {"draws"} - chance_of(found.one, many)  # they were those of dropout
        own = {name: ": each rank draws its own" * (drawn[name] is True) for name in sorted(chance)}
        notes = [f"{BY_NATURE[name]}{own[name]}; switched off for the comparison" for name in own]
    found.findings += [alike for alike in drawn.values() if isinstance(alike, Finding)]
    notes += [alike for alike in drawn.values() if isinstance(alike, str)]
    return judged(found, notes, watcher.args.strict)


def chance_of(one, many) -> set:
    """Return what random numbers were seen for, as --without names it."""
    return one.names("chance") | many.names("chance")


def judged(found, notes, strict) -> dict:
    """Return the verdict of a comparison."""
    one, many = found.one, found.many
    for finding in found.findings:
        finding.where = finding.where or place_of(many, finding)
    parts, reason = parted(found.findings, strict), found.reason or found.links_only
    kind = "different" if parts["findings"] else "same" if many.steps and not reason else "unsure"
    if found.given:
        notes.append(f"{one} draws another order: it was given the batches of {many.processes}")
    if reason:
        notes.append(f"not compared: {reason}")
    if many.cut:
        what = f"the script splits its model itself: {shares.shown(many.cut)} have other shapes with"
        notes.append(f"{what} {many.processes}, and are left out of the comparison")
    if many.names("emulated"):
        notes.append("SyncBatchNorm is computed from the gathered rows on CPUs")
    if kind != "different" and (left := not_examined(one, many)):
        notes.append(f"not examined: {left}")
    record = {"processes": many.processes, "verdict": kind, "notes": [*map(one_line, notes)]}
    return record | parts | {"table": table(one, many)}


def not_examined(one, many) -> str:
    """Return what of the script was not run, or not looked at."""
    found = []
    longest = max((len(note["batches"]) for note in many.ranks[0].passes(many.loader)), default=0)
    if many.loader is not None and longest > one.order["batches"] and not many.names("whole"):
        found.append(f"batches after number {one.order['batches']} of an epoch")
    script = Path(many.order["real"], many.order["command"][0])
    if "hash(" in script.read_text(errors="replace"):
        found.append("hash() of texts, which is the same in all ranks here, and isn't under torchrun")
    found += sorted(
        f"what {name} looks at" for name in one.names("not examined") | many.names("not examined")
    )
    if one.names("cut"):
        found.append(f"what follows step {len(one.steps)}")
    return ", ".join(found)


def table(one, many) -> dict:
    """Return what both worlds did, a row each."""
    far = farthest(one, many)
    rows = {name: list(cells) for name, *cells in zip(ROWS, column(one), column(many), strict=True)}
    return rows | {"largest difference of a gradient": ["", "-" if far == math.inf else f"{far:.1g}"]}


def farthest(one, many) -> float:
    """Return the largest difference of a gradient in a step; endless where only the weights count, or no step does."""
    both = range(min(len(one.steps), len(many.steps)))
    asked = [k for k in both if many.sums[k]["gradients"]]
    asked = [k for k in asked if not (many.settled(k) or chain.made_alike(one, many, k))]
    return max((chain.off_at(one, many, k)[0] for k in asked), default=math.inf)


def column(world) -> list:
    """Return what one world did, for each row of the table."""
    if not world.steps:
        return [world.processes, 0, *"------"]
    first, last, step = world.sums[0], world.sums[-1], world.steps[-1][0]
    norms = [first["gradients"], last["gradients"], last["weights"]]
    rate = "by hand" if world.names("by hand") else f"{step['rates'][0]:.6g}"
    return [
        world.processes,
        len(world.steps),
        world.in_rows[0].total() or "not seen",
        *(f"{norm(sketches):.6g}" if sketches else "-" for sketches in norms),
        rate,
        str(sum(step["calls"].values())),  # those of DDP and FSDP as well
    ]

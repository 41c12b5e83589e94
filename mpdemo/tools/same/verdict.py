"""Runs a script with several processes and with one, and says whether it is the same training, and what differs."""

import functools

from mpdemo.errors import one_line
from mpdemo.tools.same import chain, ends, inside, shares
from mpdemo.tools.same.finding import BY_NATURE, Finding, norm, parted, tolerance
from mpdemo.tools.same.worlds import refuse


class Comparison:
    """A world of several and one process that begins each step with its weights, and what is found between them."""

    def __init__(self, watcher, count, many, without):
        self.many, self.without = many, set(without)
        self.findings, self.compared = [], False
        self.given = False  # whether one process was given the samples of the several
        weights = sorted(map(str, many.notes.glob("*.weights")))
        self.run = functools.partial(watcher.run_new, count, without=self.without, forced=weights)
        self.one = self.run()
        if watcher.args.device and not (self.one.error or self.one.steps):
            # some scripts end at once where they don't see two GPUs
            self.run = functools.partial(self.run, devices=many.processes)
            self.one = self.run()
        self.reason = only_watched(watcher, self.one)  # why nothing can be said, or of the ranks alone
        if self.reason:
            return
        refuse(self.one)
        many.cut = inside.cut(self.one, many)
        for world in (self.one, many) if many.cut else ():
            world.leave_out(many.cut)
        self.reason, failed = incomparable(self.one, many), ends.of_end(many)
        if alone := shares.not_distributed(many):
            self.findings = [alone]
        elif self.reason:
            self.findings = [failed] if many.cut and failed else []
        elif failed:
            self.findings = [*shares.of_data(self.one, many)] or [failed]
            if failed.name == "fails with several" and (reason := only_watched(watcher, many)):
                self.findings, self.reason = [], reason
        else:
            self.compare()

    def compare(self):
        """Look at the rows, follow the chain on equal ones, and look at what is sent and written."""
        many = self.many
        self.findings += [*shares.of_data(self.one, many), *shares.of_model(many)]
        if all(finding.has("beside") for finding in self.findings):
            if shares.unequal(self.one.in_samples, many.in_samples):  # then on those of the several
                self.given = True
                self.one = self.run(replay={str(self.one.loader): many.batches()})
                self.one.leave_out(many.cut)
            self.follow()
        self.findings += [*shares.of_messages(many), *shares.of_files(many)]

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
        self.reason = f"{what}: the ranks are compared with each other, and not with one process"
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
    first, kind = many.ranks[0], finding.record()["code"][:2]
    if kind != "S1":
        return first.first("optimizer at") if kind == "S3" else ""
    which = "taken_at" if finding.name == "no set_epoch" else "line"
    rows = [*(note[which] for note in first.passes(many.loader)), *first.names("loader at")]
    rows += first.names("seeded at")[-1:] * (finding.name == "no sampler")  # what a loop draws by itself
    return next(iter(rows + [note["where"] for note in first.of("called")]), "")


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
    drawn = [shares.of_chance(one, many, name) for name in sorted(chance)]
    serious = any(not (f.has("chance") or f.has("beside") or f.has("note")) for f in found.findings)
    differs = not found.compared or any(finding.has("chance") for finding in found.findings)
    if chance and differs and not serious:
        without = found.without | chance
        many = watcher.run_new(many.processes, without=without)
        found = Comparison(watcher, count, many, without)
        chance -= {"draws"} - chance_of(found.one, many)  # they were those of dropout
        notes = [f"{BY_NATURE[name]}; switched off for the comparison" for name in sorted(chance)]
    found.findings += [alike for alike in drawn if isinstance(alike, Finding)]
    notes += [alike for alike in drawn if alike not in ("", *found.findings)]
    return judged(found, notes, watcher.args.strict)


def chance_of(one, many) -> set:
    """Return what random numbers were seen for, as --without names it."""
    return one.names("chance") | many.names("chance")


def judged(found, notes, strict) -> dict:
    """Return the verdict of a comparison."""
    one, many = found.one, found.many
    for finding in found.findings:
        finding.where = finding.where or place_of(many, finding)
    parts, reason = parted(found.findings, strict), found.reason
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
    found += sorted(
        f"what {name} looks at" for name in one.names("not examined") | many.names("not examined")
    )
    if one.names("cut"):
        found.append(f"what follows step {len(one.steps)}")
    return ", ".join(found)


def table(one, many) -> dict:
    """Return what both worlds did, a row each."""
    columns = column(one), column(many)
    off = [chain.off_at(one, many, k)[0] for k in inside.steps_of(one, many)]
    rows = {name: [of_world.get(name, "-") for of_world in columns] for name in columns[not one.steps]}
    return rows | {"largest difference of a gradient": ["", f"{max(off):.1g}" if any(off) else "-"]}


def column(world) -> dict:
    """Return what one world did, by the rows of the table."""
    found = {"processes": world.processes, "steps": len(world.steps)}
    if not world.steps:
        return found
    first, last, step = world.sums[0], world.sums[-1], world.steps[-1][0]
    return found | {
        "rows per step": world.in_rows[0].total() or "not seen",
        "first gradient": f"{norm(first['gradients']):.6g}",
        "last gradient": f"{norm(last['gradients']):.6g}",
        "last weights": f"{norm(last['weights']):.6g}",
        "learning rate": "by hand" if world.names("by hand") else f"{step['rates'][0]:.6g}",
        "messages per step": str(sum(step["calls"].values())),  # those of DDP and FSDP as well
    }

"""The best pipeline of a model on so many devices: ``python -m mpdemo plan --stages``.

Taught in notebooks/05_pipeline.ipynb.
"""

from typing import NamedTuple

from tabulate import tabulate

from mpdemo.cuts import block_names, resolve_cut
from mpdemo.errors import UserError
from mpdemo.plan import planner, strategies
from mpdemo.plan.advice import case_of, commands
from mpdemo.plan.case import Case, Fit
from mpdemo.plan.subject import MIB, RESERVE
from mpdemo.schedules import placement, usual_stages_per_rank


class Plan(NamedTuple):
    """A chosen candidate with everything it was chosen from."""

    request: object
    case: Case
    best: planner.Candidate
    devices: list  # of DeviceMemory, by a dry run
    candidates: list

    def usual(self):
        """Return the candidate with the usual cut, 1F1B where it runs and as many microbatches as the plan."""
        count = self.best.microbatches
        schedule = "1F1B" if count >= self.case.devices else "GPipe"
        return planner.evaluate(self.case, schedule, count, planner.usual_cut(self.case))


def make_plan(request) -> Plan:
    """Search for the best plan; refuse where none can be, or none fits."""
    per_rank = usual_stages_per_rank(request.schedule) if request.schedule else 1
    points = resolve_cut(block_names(request.model), request.cut, request.stages * per_rank)
    fixed = {"cut": points if request.cut else None}
    fixed |= {"schedules": [request.schedule]} if request.schedule else {}
    fixed |= {"microbatches": [request.microbatches]} if request.microbatches else {}
    case = case_of(request, request.stages)
    candidates = planner.candidates(case, **fixed)
    if not candidates:
        raise UserError(
            f"no schedule runs {request.stages} devices with a batch of {request.batch} cut like that; "
            f"allowed: a batch with a divisor from {request.stages} to {planner.MOST_MICROBATCHES}, "
            "or other --microbatches, --schedule, --cut"
        )
    return Plan(request, case, *that_fits(case, candidates), candidates)


def that_fits(case, candidates):
    """Return the first of three candidates that fits by a dry run, and the memory of its devices; refuse where none."""
    over = []
    for candidate in candidates[:3]:
        devices = planner.devices(case, candidate)
        over.append(max(device.peak for device in devices) - case.limit)
        if over[-1] <= 0:
            return candidate, devices
    nearest = candidates[over.index(min(over))]
    raise UserError(
        f"no plan fits: {case.devices} devices of {case.memory / 2**30:.3g} GiB (0.75 GiB of it for CUDA), "
        f"batch {case.batch}; the smallest found is over by {min(over) / MIB:,.0f} MiB ({nearest.schedule}, "
        f"{nearest.microbatches} microbatches); allowed: more --gpu-memory or --stages, or a smaller --batch"
    )


def answer(plan) -> tuple:
    """Return the report that ``mpdemo plan`` prints, and its rows for a JSON file."""
    request, case, best = plan.request, plan.case, plan.best
    limit = f" of {request.gpu_memory / 2**30:.4g}GiB" if request.gpu_memory else ""
    size = f"{request.image_size} x {request.image_size} pixels"
    head = f"{request.model}, batch {request.batch}, {size}, {request.stages} devices{limit}"
    chosen = f"plan: {best.schedule}, {best.microbatches} microbatches of {case.batch // best.microbatches}"
    rows, known = compared(plan)
    source = f"simulated with times estimated for the {case.gpu} in float32; memory without CUDA's {RESERVE // MIB} MiB"
    table = f"{strategies.table(case, rows, known)}\n({source})"
    chosen = f"{chosen}, cut after {names(case, best.points)}"
    text = [f"{head}\n{chosen}", _stages(plan), _memory(plan), table, commands(request, rows[:1])]
    return "\n\n".join(text), [strategies.as_row(case, row, known) for row in rows]


def names(case, points):
    """Return the name of the last block before every boundary."""
    return ",".join(case.blocks()[point - 1].name for point in points)


def compared(plan) -> tuple:
    """Return the plan, the usual cut, and the best of every other schedule that fits, as strategies; and their times.

    The memory of the plan is that of its dry run.
    """
    case, best, usual = plan.case, plan.best, plan.usual()
    found = {f"plan: {best.schedule}": best, f"usual cut ({names(case, usual.points)}): {usual.schedule}": usual}
    for c in plan.candidates:
        if c.schedule != best.schedule and not c.overflow(case.limit):
            found.setdefault(f"best {c.schedule}", c)
    rows, known = [], {strategies.ONE_DEVICE: case.one_device_seconds}
    for label, c in found.items():
        memory = max(device.peak for device in plan.devices) if c is best else max(c.peaks)
        settings = {"processes": case.devices, "schedule": c.schedule, "microbatches": c.microbatches}
        settings["cut"] = names(case, c.points)
        fit, label = Fit(settings, memory, sent=planner.sent(case, c)), f"{label}, {c.microbatches} microbatches"
        rows.append(strategies.Strategy(label, "pipeline", memory <= case.limit, fit))
        known[label] = c.step_time
    return rows, known


def _stages(plan):
    case, best, rows = plan.case, plan.best, []
    blocks, owners = case.blocks(), placement(best.schedule, case.devices)
    seconds = [cost.both for cost in case.costs(case.batch // best.microbatches)]
    for number, (start, stop) in enumerate(planner.stage_slices(best.points, len(blocks))):
        share, parameters = sum(seconds[start:stop]) / sum(seconds), sum(b.parameters for b in blocks[start:stop])
        inside = f"{blocks[start].name} to {blocks[stop - 1].name} ({stop - start})"
        rows.append((number, owners[number], inside, share, f"{parameters:,}"))
    headers = "stage", "device", "blocks", "share of work", "parameters"
    return tabulate(rows, headers, "simple", floatfmt=".3f", colalign=("right", "right", "left", "right", "right"))


def _memory(plan):
    kinds = "weights", "gradients", "optimizer", "activations", "peak"
    rows = [(d.device, *(getattr(d, kind) / MIB for kind in kinds)) for d in plan.devices]
    return tabulate(rows, ("device", *kinds[:-1], "peak (MiB)"), "simple", floatfmt=".0f")

"""A plan as text and as JSON. Taught in notebooks/05_pipeline.ipynb."""

from dataclasses import asdict, dataclass

from tabulate import tabulate

from mpdemo.plan import planner
from mpdemo.plan.cost import total
from mpdemo.plan.cut import stage_slices
from mpdemo.plan.footprint import sent as sent_bytes
from mpdemo.plan.subject import MIB, RESERVE
from mpdemo.schedules import SCHEDULES, placement


@dataclass(frozen=True)
class Plan:
    """A chosen candidate with everything it was chosen from.

    `request` is a `mpdemo.plan.command.Request`; `measured_on` is on how many devices of this machine the times were
    measured at once, 0 where they are estimated.
    """

    request: object
    job: planner.Workload
    best: planner.Candidate
    devices: list  # of DeviceMemory
    candidates: list
    measured_on: int = 0

    @property
    def speedup(self):
        """Predicted speed-up over one device, which naive model parallelism at best equals."""
        return planner.one_device_step_time(self.job) / self.best.step_time

    def usual(self):
        """Return the candidate with the usual cut, 1F1B where it runs and as many microbatches as the plan."""
        count = self.best.microbatches
        schedule = "1F1B" if count >= self.job.ranks else "GPipe"
        return planner.evaluate(self.job, schedule, count, planner.usual_cut(self.job))


def as_dict(plan):
    """Return the plan for a JSON file: seconds, bytes, names of blocks."""
    best, usual = plan.best, plan.usual()
    return {
        "model": plan.request.model,
        "batch": plan.job.batch,
        "image_size": plan.request.image_size,
        "schedule": best.schedule,
        "microbatches": best.microbatches,
        "cut": [plan.job.blocks[point - 1].name for point in best.points],
        "stages": stages(plan),
        "devices": [{**asdict(device), "peak": device.peak} for device in plan.devices],
        "step_time": best.step_time,
        "speedup": plan.speedup,
        "idle_share": best.simulation.idle_share,
        "rows": [_as_row(plan, label, candidate) for label, candidate in _compared(plan)],
        "usual": {"cut": [plan.job.blocks[p - 1].name for p in usual.points], "step_time": usual.step_time},
    }


def stages(plan):
    """Return one dictionary per stage: its device, its blocks, its share of the work, its parameters."""
    job, best = plan.job, plan.best
    owners = placement(best.schedule, job.ranks)
    costs, rows = job.costs[job.batch // best.microbatches], []
    for number, (start, stop) in enumerate(stage_slices(best.points, len(job.blocks))):
        rows.append(
            {
                "stage": number,
                "device": owners[number],
                "first": job.blocks[start].name,
                "last": job.blocks[stop - 1].name,
                "blocks": stop - start,
                "share": total(costs[start:stop]) / total(costs),
                "parameters": sum(block.parameters for block in job.blocks[start:stop]),
            }
        )
    return rows


def text(plan):
    """Return the report that ``mpdemo plan`` prints."""
    return "\n\n".join([_head(plan), _stages(plan), _memory(plan), _speed(plan), _command(plan)])


def _names(plan, points, separator=", "):
    """Return the name of the last block before every boundary."""
    return separator.join(plan.job.blocks[point - 1].name for point in points)


def _head(plan):
    request, best = plan.request, plan.best
    source = f"cost of the blocks estimated for a {request.cost}"
    if plan.measured_on == 1:
        source = "blocks and the optimizer's update measured on one device of this machine"
    elif plan.measured_on:
        source = f"blocks, messages and the optimizer's update measured on {plan.measured_on} devices of this machine"
    limit = f" of {request.gpu_memory / 2**30:.4g}GiB" if request.gpu_memory else ""
    size = f"{request.image_size} x {request.image_size} pixels"
    return (
        f"{request.model}, batch {request.batch}, {size}, {request.stages} devices{limit}; "
        f"{source}\n"
        f"plan: {best.schedule}, {best.microbatches} microbatches of {request.batch // best.microbatches}, "
        f"cut after {_names(plan, best.points) or 'nothing'}"
    )


def _stages(plan):
    rows = [
        (row["stage"], row["device"], f"{row['first']} to {row['last']} ({row['blocks']})", row["share"])
        + (f"{row['parameters']:,}",)
        for row in stages(plan)
    ]
    headers = "stage", "device", "blocks", "share of work", "parameters"
    return tabulate(rows, headers, "simple", floatfmt=".3f", colalign=("right", "right", "left", "right", "right"))


def _memory(plan):
    kinds = "weights", "gradients", "optimizer", "activations", "peak"
    rows = [(d.device, *(getattr(d, kind) / MIB for kind in kinds)) for d in plan.devices]
    table = tabulate(rows, ("device", *kinds[:-1], "peak (MiB)"), "simple", floatfmt=".0f")
    kept = f"of a GPU's memory {RESERVE // MIB} MiB are kept for CUDA"
    return f"{table}\n(what PyTorch allocates, without workspaces; {kept})"


def _compared(plan) -> list:
    """Return (words, candidate) of the plan, of the usual cut, and of the best of every other schedule that fits."""
    best, usual = plan.best, plan.usual()
    found = [(f"plan: {best.schedule}", best), (f"usual cut ({_names(plan, usual.points)}): {usual.schedule}", usual)]
    for schedule in SCHEDULES:
        others = [c for c in plan.candidates if c.schedule == schedule and not c.overflow(plan.job.limit)]
        if others and schedule != best.schedule:
            found.append((f"best {schedule}:", others[0]))
    return [(f"{words}{'' if words[-1] == ':' else ','} {c.microbatches} microbatches", c) for words, c in found]


def _as_row(plan, label, candidate):
    """Return a candidate for a JSON file, with the keys of `mpdemo.plan.strategies.as_row`."""
    peak = max(device.peak for device in plan.devices) if candidate is plan.best else max(candidate.peaks)
    fits, sent = peak <= plan.job.limit, sent_bytes(plan.job, candidate) / MIB
    row = {"strategy": label, "fits": fits, "memory_mib": peak / MIB, "messages_mib": sent}
    return row | {"seconds": candidate.step_time}


def _speed(plan):
    single = planner.one_device_step_time(plan.job)
    rows = [
        (label, f"{c.step_time:.4g}", f"{single / c.step_time:.2f}", f"{c.simulation.idle_share:.0%}")
        for label, c in _compared(plan)
    ]
    headers = "", "step (s)", "against one device", "idle"
    return tabulate(rows, headers, "simple", disable_numparse=True, colalign=("left", "right", "right", "right"))


def _command(plan):
    request, best = plan.request, plan.best
    cut = _names(plan, best.points, ",")
    return (
        f"to train it: python -m mpdemo train --rung pipeline --form {request.form} --model {request.model} "
        f"--image-size {request.image_size} --batch-size {request.batch} --processes {request.stages} "
        f"--schedule {best.schedule} --microbatches {best.microbatches}" + (f" --cut {cut}" if cut else "")
    )

"""Say a plan in words and numbers."""

from dataclasses import asdict, dataclass

from mpdemo.plan import planner
from mpdemo.plan.memory import MIB, RESERVE
from mpdemo.schedules import SCHEDULES, placement


@dataclass(frozen=True)
class Plan:
    """A chosen candidate with everything it was chosen from.

    `request` has the attributes of the command line's arguments; `devices` are the memory estimates on fake tensors.
    """

    request: object
    job: planner.Job
    best: planner.Candidate
    found: list
    devices: list

    @property
    def speedup(self):
        """Predicted speed-up over one device, which naive model parallelism at best equals."""
        return planner.one_device_step_time(self.job) / self.best.step_time

    def usual(self):
        """Return the candidate with the usual cut, 1f1b where it runs and as many microbatches as the plan."""
        count = self.best.microbatches
        schedule = "1f1b" if count >= self.job.ranks else "naive"
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
        "usual": {"cut": [plan.job.blocks[p - 1].name for p in usual.points], "step_time": usual.step_time},
    }


def stages(plan):
    """Return one dictionary a stage: its device, its blocks, its share of the work, its parameters."""
    job, best = plan.job, plan.best
    owners = placement(best.schedule, job.ranks)
    costs = job.costs[job.batch // best.microbatches]
    whole = sum(cost.both for cost in costs)
    rows = []
    for number, (start, stop) in enumerate(planner.stage_slices(best.points, len(job.blocks))):
        rows.append(
            {
                "stage": number,
                "device": owners[number],
                "first": job.blocks[start].name,
                "last": job.blocks[stop - 1].name,
                "blocks": stop - start,
                "share": sum(cost.both for cost in costs[start:stop]) / whole,
                "parameters": sum(block.parameters for block in job.blocks[start:stop]),
            }
        )
    return rows


def text(plan):
    """Return the report that ``mpdemo plan`` prints."""
    return "\n".join([*_head(plan), "", *_stages(plan), "", *_memory(plan), "", *_speed(plan), "", _command(plan)])


def _head(plan):
    ask, best = plan.request, plan.best
    source = "measured on this machine" if ask.cost == "measure" else f"estimated for a {ask.cost}"
    limit = f" of {ask.gpu_memory}" if ask.gpu_memory else ""
    names = ", ".join(plan.job.blocks[point - 1].name for point in best.points)
    return [
        f"{ask.model}, batch {ask.batch}, {ask.image_size} x {ask.image_size} pixels, {ask.stages} devices{limit}; "
        f"cost of the blocks {source}",
        f"plan: {best.schedule}, {best.microbatches} microbatches of {ask.batch // best.microbatches}, "
        f"cut after {names or 'nothing'}",
    ]


def _stages(plan):
    yield "stage  device  blocks                          share of work   parameters"
    for row in stages(plan):
        span = f"{row['first']} to {row['last']} ({row['blocks']})"
        yield f"{row['stage']:5}  {row['device']:6}  {span:30}  {row['share']:13.3f}  {row['parameters']:11,}"


def _memory(plan):
    yield "device  weights  gradients  optimizer  activations     peak (MiB)"
    for device in plan.devices:
        parts = (device.weights, device.gradients, device.optimizer, device.activations, device.peak)
        weights, gradients, optimizer, activations, peak = (part / MIB for part in parts)
        yield f"{device.device:6}  {weights:7.0f}  {gradients:9.0f}  {optimizer:9.0f}  {activations:11.0f}  {peak:7.0f}"
    yield f"(what PyTorch allocates, without workspaces; of a GPU's memory {RESERVE // MIB} MiB are kept for CUDA)"


def _speed(plan):
    best, usual, single = plan.best, plan.usual(), planner.one_device_step_time(plan.job)
    yield "                                                       step (s)  against one device   idle"
    yield _line(f"plan: {best.schedule}, {best.microbatches} microbatches", best, single)
    names = ", ".join(plan.job.blocks[point - 1].name for point in usual.points)
    yield _line(f"usual cut ({names}): {usual.schedule}, {usual.microbatches} microbatches", usual, single)
    for schedule in SCHEDULES:
        others = [c for c in plan.found if c.schedule == schedule and not c.overflow(plan.job.limit)]
        if others and schedule != best.schedule:
            other = others[0]
            yield _line(f"best {schedule}: {other.microbatches} microbatches", other, single)


def _line(label, candidate, single):
    return (
        f"{label:53}  {candidate.step_time:8.4g}  {single / candidate.step_time:18.2f}  "
        f"{candidate.simulation.idle_share:5.0%}"
    )


def _command(plan):
    ask, best = plan.request, plan.best
    cut = ",".join(plan.job.blocks[point - 1].name for point in best.points)
    return (
        f"to train it: python -m mpdemo train --rung pipeline --form {ask.form} --model {ask.model} "
        f"--image-size {ask.image_size} --batch-size {ask.batch} --processes {ask.stages} "
        f"--schedule {best.schedule} --microbatches {best.microbatches}" + (f" --cut {cut}" if cut else "")
    )

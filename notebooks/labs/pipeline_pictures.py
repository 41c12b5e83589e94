"""The pictures of notebooks 30 to 32: schedules, simulated and recorded.

The unit of time is the forward pass of one microbatch on one rank, however many stages that rank's part of the model is
cut into; so all schedules do the same work.
"""

from functools import partial
from statistics import median

from mpdemo.errors import UserError
from mpdemo.measure import paired
from mpdemo.notebook.ladder import as_long_as_timed
from mpdemo.notebook.plots import curves, timelines
from mpdemo.notebook.plots.timeline import in_milliseconds
from mpdemo.predict import simulate, usual_stages_per_rank
from mpdemo.predict.simulate import simulate_order
from mpdemo.settings.cuts import block_names, resolve_cut

__all__ = ["as_long_as_timed", "best_split", "curves", "microbatches", "order", "schedule"]
__all__ += ["timed", "timelines"]
IMAGES = {"channels": 3, "image_size": 224, "classes": 1000, "norm": "batch"}


def schedule(name, ranks, microbatches):
    """Simulate a schedule: a backward pass takes twice as long as a forward pass, and its halves equally long."""
    per_rank = usual_stages_per_rank(name)
    forward = [1 / per_rank] * ranks * per_rank
    return simulate(name, forward, [2 * time for time in forward], microbatches, ranks, weight=0.5)


def order(operations):
    """Draw an order of your own (one list of operations per stage) above GPipe, or say why it never ends."""
    try:
        yours = simulate_order(operations, forward=1, backward=2)
    except UserError as error:
        return print(error)
    return timelines({"yours": yours, "GPipe": schedule("GPipe", len(operations), len(operations[0]) // 2)})


def microbatches(splits):
    """Print and draw what each number of microbatches costs: ``splits`` of labs/pipeline.py, with numbers as keys."""
    for count, rounds in splits.items():
        speedup = paired.ratio(splits[1]["measured"], rounds["measured"])
        more = paired.ratio(rounds["computing"], splits[1]["computing"])
        print(f"{count:2} microbatches: speed-up {speedup}, computing takes {more} times as long")
    best = min(splits, key=lambda count: median(splits[count]["measured"]))
    print(f"shortest median step: {best} microbatches")
    seconds = {
        kind: [
            {"microbatches": count, "step (s)": median(rounds[kind])} for count, rounds in splits.items()
        ]
        for kind in ("measured", "simulated", "computing")
    }
    return curves(seconds, x="microbatches", y="step (s)")


def best_split(model, usual, gpu, batch, microbatches):
    """Draw a step of 1F1B on two GPUs, split after the block `usual` and where the stages take equally long."""
    from mpdemo.tools.plan import own, own_scaling
    from mpdemo.tools.plan.loading import of_course
    from mpdemo.tools.plan.own_model import OwnModel
    from mpdemo.tools.plan.request import PlanRequest
    from mpdemo.tools.plan.split import balanced_cut, stage_slices

    whole = OwnModel(model, (3, 224, 224), function=partial(of_course, model, **IMAGES))
    request = PlanRequest(whole, batch, devices=2, gpu=gpu, optimizer="momentum")
    size, names = batch // microbatches, block_names(model)
    blocks = own_scaling.chain(own.steps_of(request, size, held=True), size, request.roof("fp32"))
    panels, steps = {}, []
    for points in (resolve_cut(names, usual, 2), balanced_cut([block.seconds for block in blocks], 2)):
        slices, crosses = stage_slices(points, len(blocks)), blocks[points[0] - 1].crossing
        seconds = [sum(block.seconds for block in blocks[start:stop]) for start, stop in slices]
        forward, backward = ([part * time / 3 for time in seconds] for part in (1, 2))  # as for products
        step = simulate("1F1B", forward, backward, microbatches, 2, communication=crosses / request.link(1))
        peaks = own.stage_peaks(request, blocks, slices, [2, 1], [microbatches * crosses] * 2)
        steps.append(step.step_time)
        panels[title := f"split before {names[points[0]]}"] = in_milliseconds(step.events)
        said = " and ".join(f"{peak / 2**30:.1f} GiB" for peak in peaks)
        print(f"{title}: a planned step of {steps[-1] / steps[0]:.2f}, peak memory {said}")
    return timelines(panels, unit="ms, estimated")


def timed(schedules) -> dict:
    """Print the medians of the schedules that labs/pipeline.py has timed, in ms; return the speed-ups over `naive`."""
    speedups, naive = {}, schedules["naive"]["measured"]
    for name, rounds in schedules.items():
        speedups[name] = paired.ratio(naive, rounds["measured"])
        times = (
            f"{kind} {1e3 * median(rounds[kind]):.0f}" for kind in ("measured", "simulated", "computing")
        )
        print(f"{name:22}", *times, "ms" if name == "naive" else f"ms, speed-up {speedups[name]}")
    return speedups

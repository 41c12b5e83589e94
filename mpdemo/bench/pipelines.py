"""The pipeline measurements of ``python -m mpdemo bench``: schedules and cuts against naive model parallelism.

Each row holds what was measured, what the simulation of the schedule says with the stage times of the same steps, and
how far apart the two are: what is lost to communication and to the library's work between two operations.
"""

import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

from tqdm import tqdm

from mpdemo.bench.parts import make
from mpdemo.labs.contest import Contest, quartiles, recorded_steps
from mpdemo.settings import Settings
from mpdemo.timeline import read
from mpdemo.timeline.record import Recorder

PIPELINE = {"rung": "pipeline", "form": "per-device", "timeline": True}
# model, pixels a side, batch, microbatch counts: an operation should take 5 ms or more, since sending one takes 0.5 ms
PIPELINES = (
    ("convstack", 32, 64, (2, 4, 8, 16)),
    ("transformer", 28, 256, (2, 4, 8, 16)),
)
HALVES, QUARTERS = "block.3", "block.1,block.3,block.5"  # equal stages of eight equal blocks


def pipeline(world, rounds):
    """Every schedule and microbatch count against naive model parallelism and against its simulation."""
    rows = []
    for model, size, batch, counts in PIPELINES:
        base = Settings(model=model, image_size=size, batch_size=batch, norm="group", **PIPELINE)
        variants = [("naive", 1, HALVES)]
        for m in counts:
            variants += [("gpipe", m, HALVES), ("1f1b", m, HALVES)]
            variants += [(name, m, QUARTERS) for name in ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")]
        rows += pipeline_rows(world, rounds, base, variants)
    return rows + two_cuts(world, rounds)


def two_cuts(world, rounds):
    """ResNet-101: the cut after layer2, as in the courses this one grew from, against the balanced one."""
    base = Settings(model="resnet101", image_size=128, batch_size=32, **PIPELINE)
    variants = [(name, m, place) for place in ("layer2.3", "layer3.6") for name, m in (("naive", 1), ("1f1b", 8))]
    return pipeline_rows(world, rounds, base, variants)


def pipeline_rows(world, rounds, base, variants):
    """Measure all variants (schedule, M, cut) of one model in one contest; a row each, compared with the first."""
    contest, rungs = Contest(world), []
    for schedule, microbatches, place in variants:
        settings = replace(base, schedule=schedule, microbatches=microbatches, cut=place)
        rung, settings, step = make(settings, world)
        rungs.append((f"{schedule} M={microbatches} cut={place}", rung, settings))
        contest.add(rungs[-1][0], step)
    with tqdm(total=rounds, desc=base.model, unit="round", disable=world.rank > 0) as bar:
        contest.run(rounds, each_round=lambda done: bar.update(done - bar.n))
    recording, first = recording_seconds(world.device), rungs[0][0]
    return [row_of(world, contest, name, rung, settings, first, recording) for name, rung, settings in rungs]


def row_of(world, contest, name, rung, settings, first, recording):
    """One line of the table: measured, simulated, and how far apart. All ranks must call this."""
    steps = recorded_steps(rung)
    simulated = [read.predict([step], settings.schedule) for step in steps]
    shares = [s.step_time / read.step_time(step) for s, step in zip(simulated, steps, strict=True)]
    speedup, *speedup_quartiles = contest.ratio(first, name)
    operations = len(rung.recorder.steps[0]["events"])
    return {
        "model": settings.model,
        "batch": settings.batch_size,
        "cut": settings.cut,
        "schedule": settings.schedule,
        "processes": world.world_size,
        "microbatches": settings.microbatches,
        "step_seconds": contest.median(name),
        "step_quartiles": quartiles(contest.seconds[name]),
        "speedup": speedup,  # over the first variant
        "speedup_quartiles": speedup_quartiles,
        "simulated_seconds": statistics.median(s.step_time for s in simulated),
        "fraction_of_bound": statistics.median(shares),
        "fraction_quartiles": quartiles(shares),
        "measured_idle_share": statistics.median(read.idle_share(step) for step in steps),
        "predicted_idle_share": statistics.median(s.idle_share for s in simulated),
        "recorder_share": operations * recording / contest.median(name),
    }


def recording_seconds(device, repeats=10_000) -> float:
    """Seconds that the recorder adds to one operation, measured around one that does nothing."""
    methods = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    senders = ("get_fwd_send_ops", "get_bwd_send_ops")
    stage = SimpleNamespace(stage_index=0, **dict.fromkeys((*methods, *senders), lambda chunk: None))
    seconds = []
    for attach in (False, True):
        recorder = Recorder(0, device)
        if attach:
            recorder.attach(stage)
        with recorder.step():
            begin = time.perf_counter()
            for number in range(repeats):
                stage.forward_one_chunk(number)
            seconds.append((time.perf_counter() - begin) / repeats)
    return seconds[1] - seconds[0]

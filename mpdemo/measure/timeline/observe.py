"""Record a trial of a rung that holds the whole model, from outside: the rung's file stays as the notebooks show it.

Besides F and B, the forward and the backward passes, these timelines hold O, the optimizer's step, and may hold A, the
all-reduce of a bucket of gradients, which runs while B continues.
"""

from contextlib import ExitStack
from functools import partial

from mpdemo.measure.timeline import read
from mpdemo.rungs import data_parallel
from mpdemo.world.collectives import gather_objects


def observe(trial, recorder):
    """Record all steps of a `mpdemo.measure.trial.Trial` and of its optimizer from now on."""
    trial.run.recorder = recorder
    if trial.s.rung == "data_parallel" and trial.run.device.type == "cpu":
        record_threads(trial.rung.model, recorder)
    else:
        recorder.watch_passes(trial.rung.model)
    record_updates(trial.rung.optimizer, recorder)


def record_updates(optimizer, recorder):
    """Record the optimizer's steps."""
    under_way = ExitStack()
    optimizer.register_step_pre_hook(lambda *_: under_way.enter_context(recorder.operation("O")))
    optimizer.register_step_post_hook(lambda *_: under_way.close())


def record_threads(model, recorder):
    """Record what each thread of the data-parallel rung does when; the first copy of the model is the trial's own."""
    devices = {id(model): 0}

    def describe(kind, copy, *_):
        return {"kind": kind, "rank": devices.setdefault(id(copy), len(devices))}

    for name, kind in {"forward": "F", "gradients": "B"}.items():
        recorder.watch_calls(data_parallel, name, partial(describe, kind))


def recorded_steps(trial) -> list:
    """Return the timeline of every step of a trial, of all ranks that take part in it; all ranks must call this."""
    ranks = [steps for steps in gather_objects(trial and trial.run.recorder.steps) if steps]
    return [read.merge(step) for step in zip(*ranks, strict=True)]

"""Record a trial of a rung that holds the whole model, from outside: the rung's file stays as the notebooks show it.

Hooks of PyTorch say when a forward pass begins and when a backward pass begins; an operation ends where the next one
begins. Beside F and B these timelines hold O, the optimizer's step, and A, the all-reduce of a bucket of gradients
between the moment when it was ready and the moment when it was reduced; A runs while B continues.
"""

from contextlib import ExitStack
from importlib import import_module
from itertools import pairwise

from mpdemo.timeline import read
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects


def observe(trial, recorder):
    """Record all steps of a `mpdemo.trial.Trial` and of its optimizer from now on."""
    trial.recorder = recorder
    if trial.s.rung == "data_parallel" and trial.device.type == "cpu":
        record_threads(trial.held, recorder)
    else:
        record_passes(trial, recorder)
    record_updates(trial.updates, recorder)


def record_passes(trial, recorder):
    """Record the forward and backward passes of every step through the trial's model."""
    beginnings = []

    def note(kind):
        if recorder.under_way:
            beginnings.append((kind, clock.read(recorder.device)))

    def wait_for_gradient(module, inputs, outputs):
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: note("B"))

    def end(*_):
        note("end")
        passes = [(kind, begin, end) for (kind, begin), (_, end) in pairwise(beginnings)]
        if ready := recorder.latest("A"):  # the last gradient was ready; then the step waited for the all-reduce
            passes[-1] = (*passes[-1][:2], ready["start"])
        for number, (kind, begin, end) in enumerate(passes):
            recorder.add(kind, begin, end, microbatch=number // 2)
        beginnings.clear()

    trial.held.register_forward_pre_hook(lambda module, inputs: note("F"))
    trial.held.register_forward_hook(wait_for_gradient)
    trial.updates.register_step_pre_hook(end)


def record_updates(optimizer, recorder):
    """Record the optimizer's steps."""
    under_way = ExitStack()
    optimizer.register_step_pre_hook(lambda *_: under_way.enter_context(recorder.operation("O", stage=0)))
    optimizer.register_step_post_hook(lambda *_: under_way.close())


def record_threads(model, recorder):
    """Record what each thread of the data-parallel rung does when; the first copy of the model is the trial's own."""
    data_parallel, devices = import_module("mpdemo.rungs.data_parallel"), {id(model): 0}

    def recorded(function, kind):
        def call(copy, *arguments):
            with recorder.operation(kind, stage=0, rank=devices.setdefault(id(copy), len(devices))):
                return function(copy, *arguments)

        return call

    data_parallel.forward = recorded(data_parallel.forward, "F")
    data_parallel.gradients = recorded(data_parallel.gradients, "B")


def recorded_steps(trial) -> list:
    """Return the timeline of every step of a trial, of all ranks that take part in it; all ranks must call this."""
    ranks = [steps for steps in gather_objects(trial and trial.recorder.steps) if steps]
    return [read.merge(list(step)) for step in zip(*ranks, strict=True)]

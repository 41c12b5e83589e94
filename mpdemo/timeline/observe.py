"""Record a rung that holds the whole model, from outside: the rung's file stays as the notebooks show it.

Hooks of PyTorch say when a forward pass begins and when a backward pass begins; an operation ends where the next one
begins. Beside F and B these timelines hold O, the optimizer's step, and A, the all-reduce of a bucket of gradients
between the moment when it was ready and the moment when it was reduced; A runs while B goes on.
"""

from contextlib import ExitStack
from itertools import pairwise

from mpdemo.world import clock

KINDS_OF_THREADS = {"apply": "F", "gradients": "B"}  # what mpdemo/parallel/threads.py does in its threads


def observe(rung, optimizer, recorder):
    """Record all steps of a rung and of its optimizer from now on.

    Parameters
    ----------
    rung : mpdemo.parallel.rung.Rung
        With the attribute `model`, the whole model.
    optimizer : torch.optim.Optimizer
    recorder : Recorder
    """
    rung.recorder, wrapper = recorder, getattr(rung, "parallel", rung.model)
    if hasattr(wrapper, "threads"):
        wrapper.threads = RecordedThreads(wrapper.threads, recorder)
    else:
        record_passes(rung, wrapper, recorder)
    record_updates(optimizer, recorder)


def record_passes(rung, model, recorder):
    """Record the forward and backward passes of every step of `rung` through `model`."""
    beginnings = []

    def note(kind):
        beginnings.append((kind, clock.read(recorder.device)))

    def wait_for_gradient(module, inputs, outputs):
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: note("B"))

    model.register_forward_pre_hook(lambda module, inputs: note("F"))
    model.register_forward_hook(wait_for_gradient)
    step = rung.step

    def recorded_step(images, labels):
        beginnings.clear()
        result = step(images, labels)
        note("end")
        passes = [(kind, begin, end) for (kind, begin), (_, end) in pairwise(beginnings)]
        if ready := recorder.latest("A"):  # the last gradient was ready; then the step waited for the all-reduce
            passes[-1] = (*passes[-1][:2], ready["start"])
        for number, (kind, begin, end) in enumerate(passes):
            recorder.add(kind, begin, end, microbatch=number // 2)
        return result

    rung.step = recorded_step


def record_updates(optimizer, recorder):
    """Record the optimizer's steps."""
    under_way = ExitStack()
    optimizer.register_step_pre_hook(lambda *_: under_way.enter_context(recorder.operation("O", stage=0)))
    optimizer.register_step_post_hook(lambda *_: under_way.close())


class RecordedThreads:
    """The threads of a `mpdemo.parallel.threads.ThreadedDataParallel`, one per device, and what each does when."""

    def __init__(self, threads, recorder):
        self.threads, self.recorder = threads, recorder

    def map(self, function, copies, *more):
        """Call a function for each copy of the model, in threads, and record it."""
        kind = KINDS_OF_THREADS[function.__name__]

        def recorded(device, *arguments):
            with self.recorder.operation(kind, stage=0, rank=device):
                return function(*arguments)

        return self.threads.map(recorded, range(len(copies)), copies, *more)


class RecordedBuckets:
    """Takes what `mpdemo.labs.ddp.time_bucket` notes of every bucket of gradients."""

    def __init__(self, recorder):
        self.recorder = recorder

    def append(self, bucket):
        """Record the all-reduce of a bucket: its size in MiB, and the clock when it was ready and when reduced."""
        _, ready, reduced = bucket
        self.recorder.add("A", ready, reduced)

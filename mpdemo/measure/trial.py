"""A rung driven from outside, one step at a time: for its gradients, or to be timed alternately with others.

`record` does some more steps under torch.profiler: what each rank computed, sent and waited for (traces.py). A rung's
file stays as the notebooks show it.
"""

import copy
import math
import os
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mpdemo.measure import spans, timeline, traces
from mpdemo.models.private_torch import all_threads
from mpdemo.predict.counting import local
from mpdemo.run import builder
from mpdemo.settings import checked, is_per_device
from mpdemo.training.recorder import around, mark
from mpdemo.training.setup import Run, build_model
from mpdemo.world.collectives import gather_objects, rest, whole
from mpdemo.world.env import ALLOWED_CORES, World

RECORDED = 5  # steps under the profiler; the first and the last are not used
STEADY = 1e-4  # learning rate: a trial does hundreds of steps on one batch


class Trial:
    """A rung on one batch, ready to compute its gradients or to do steps of a training run.

    The settings are not checked yet; one-process forms run in a world of one. The model is copied, by default built for
    1000 classes of RGB images; the batch holds at least ``settings.batch_size`` samples, random ones by default.
    """

    def __init__(self, settings, world, model=None, batch=None, lr=STEADY):
        processes = world.world_size if is_per_device(settings) else None
        self.s = checked(replace(settings, lr=lr), processes)
        model = copy.deepcopy(model) if model else build_model(self.s)
        place = world if is_per_device(settings) else World(device=world.device)
        self.run = Run(self.s, place, lambda: model)
        self.batch = batch or random_batch(self.s)
        self.rung = builder(self.s.rung)(self.run)
        self.devices = self.run.devices
        self.start = [buffer.clone() for buffer in self.rung.model.buffers()]

    def share(self):
        """Return this process's share of the trial's batch (images, labels), on its device."""
        batch = [tensor[: self.s.batch_size] for tensor in self.batch]
        images, labels = (tensor.chunk(self.rung.replicas)[self.rung.replica] for tensor in batch)
        images = images if self.rung.images else images.new_empty(len(images), 0)
        return [tensor.to(self.run.device, non_blocking=True) for tensor in (images, labels)]

    def step(self, within=None):
        """Do one step, `within` a context; return its loss, still on the device."""
        with self.cores(), self.run.observed():
            images, labels = self.share()
            with within or nullcontext():
                result = self.rung.step(images, labels)
        return torch.zeros((), device=self.run.device) if result is None else result[0]

    @contextmanager
    def cores(self):
        """Let the threads of data_parallel have every core, also where this process has been given one."""
        own = os.sched_getaffinity(0)
        if self.s.rung == "data_parallel" and self.run.device.type == "cpu":
            os.sched_setaffinity(0, ALLOWED_CORES)  # of this thread, and so of those that it starts
        yield
        os.sched_setaffinity(0, own)

    def gradients(self) -> dict:
        """Return the gradients of one step by parameter name, sharded ones whole, without an update or a recording."""
        found = {}

        def note():  # in place of the update
            for name, parameter in self.rung.model.named_parameters():
                found[name] = whole(parameter.grad).clone()

        # cuDNN's TF32 has 10 bits, and is used for some batch sizes only: equal rungs would differ by 1e-3
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with (
            exact,
            patch.object(self.rung.optimizer, "step", note),
            patch.object(self.run, "recorder", None),
        ):
            self.step()
        return found


def record(trial) -> list[dict]:
    """Record some steps of a trial that has done one; all ranks must call this, those without this trial with None."""
    if not trial:
        return record_steps(None)
    model, handles = trial.rung.model, []
    threads = trial.s.rung == "data_parallel" and trial.run.device.type == "cpu"
    blocks = [name for name in model.names if "." in name and not (threads or trial.run.recorder)]
    for number, name in enumerate(blocks):
        handles += around(model.get_submodule(name), partial(mark, kind="F", layer=number))
    steps = record_steps(
        trial.step, lasting(trial), {"experimental_config": all_threads()} if threads else {}
    )
    for handle in handles:
        handle.remove()
    return steps


def record_steps(step, base=None, words=None) -> list[dict]:
    """Call `step` under torch.profiler, and return its calls as `mpdemo.measure.traces.merge` does.

    All ranks must call this, those without a step with None. `base` is what `lasting` returns, `words` are those of the
    profiler. A recorded step also has its ``delay``: the longest time for which a rank was ready to compute, but other
    processes had its core, in s.
    """
    delays, own, kinds = (
        [],
        None,
        [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available(),
    )
    with ExitStack() as recording:
        if step:
            options = {"record_shapes": True, "profile_memory": True} | (words or {})
            profiler = recording.enter_context(profile(activities=kinds, **options))
        for _ in range(RECORDED):
            rest()
            before = delay()
            with record_function(spans.STEP):
                step and step()
            delays.append(delay() - before)
    if step:
        with TemporaryDirectory() as folder:
            profiler.export_chrome_trace(file := f"{folder}/trace.json")
            own = traces.inner(traces.with_memory(spans.load(file), base))
    ranks = [part for part in gather_objects(own) if part]
    longest = traces.inner([max(times) for times in zip(*gather_objects(delays), strict=True)])
    return [traces.merge(parts) | {"delay": delay} for *parts, delay in zip(*ranks, longest, strict=True)]


def delay() -> float:
    """Return the seconds for which this thread was ready, but other processes had its core; NaN if Linux can't tell."""
    counts = Path("/proc/thread-self/schedstat")  # ns on a core, ns ready without one
    waited = int(counts.read_text().split()[1]) / 1e9 if counts.exists() else math.nan
    return waited - (time.process_time() - time.thread_time())  # its own other threads may have had it


def lasting(trial) -> tuple:
    """Return the bytes that a rank's weights, optimizer states, gradients and activations have all the time.

    Only DDP keeps its gradients, in its buckets.
    """
    weights, states = list(trial.rung.model.parameters()), trial.rung.optimizer.state.values()
    states = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    weights, states = (sum(local(tensor).nbytes for tensor in tensors) for tensors in (weights, states))
    return weights, states, weights if trial.s.rung == "ddp" else 0, 0


def record_updates(optimizer, recorder):
    """Record the optimizer's steps."""
    under_way = ExitStack()
    optimizer.register_step_pre_hook(lambda *_: under_way.enter_context(recorder.operation("O")))
    optimizer.register_step_post_hook(lambda *_: under_way.close())


def recorded_steps(trial) -> list:
    """Return the timeline of every step of a cut model's trial, of all its ranks; all ranks must call this."""
    ranks = [steps for steps in gather_objects(trial and trial.run.recorder.steps) if steps]
    return [timeline.merge(step) for step in zip(*ranks, strict=True)]


def random_batch(settings):
    """Return random images (B, C, S, S) and labels (B,), the same in every process."""
    generator = torch.Generator().manual_seed(1)
    count, size = settings.batch_size, settings.image_size
    images = torch.randn(count, 3, size, size, generator=generator, device="cpu")
    return images, torch.randint(0, 1000, (count,), generator=generator, device="cpu")


def relative_difference(values, reference) -> float:
    """Return the worst parameter's relative error, in the 2-norm; only the names in `values` are compared.

    A parameter whose gradient is zero but for rounding (a bias before a batch norm) is measured against 1 % of the
    whole gradient's norm instead.
    """
    norms = {name: tensor.double().norm().item() for name, tensor in reference.items()}
    floor = 0.01 * sum(n**2 for n in norms.values()) ** 0.5
    apart = {
        name: (value.double().cpu() - reference[name].double().cpu()).norm()
        for name, value in values.items()
    }
    return max((norm.item() / max(norms[name], floor) for name, norm in apart.items()), default=0.0)

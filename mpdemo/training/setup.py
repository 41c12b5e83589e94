"""What a rung is built from: `Run`, which gives it the model, the data and the optimizer of its settings."""

import math
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity

from mpdemo.data import Loaders, load
from mpdemo.errors import UserError
from mpdemo.models import build
from mpdemo.settings.cuts import resolve_cut
from mpdemo.training.private_torch import compile_on_one_core, record_memory, save_memory
from mpdemo.training.recorder import Recorder
from mpdemo.training.stages import LocalStages

PRECISION = {"fp32": None, "bf16": torch.bfloat16}


class Run:
    """What a rung is built from: checked settings `s`, this process's `rank` of `world`, the `devices` it drives."""

    def __init__(self, settings, place, make_model=None):
        """The model is that of the settings, unless a trial brings its own."""
        self.s, self.place = settings, place
        self.make_model = make_model or self.model_of_settings
        self.rank, self.world, self.device = place.rank, place.world_size, place.device
        driven = settings.devices if settings.form == "one-process" else 1
        self.devices = local_devices(place.device, driven)
        self.recorder = Recorder(self.rank, self.device) if settings.timeline else None
        self.profiler = None
        self.folder = Path(settings.out)
        torch.manual_seed(settings.seed)

    @cached_property
    def dataset(self):
        """The data set of the settings."""
        return load(self.s.dataset, self.s.data, self.s.image_size, self.s.seed)

    def model(self):
        """Return the whole model with its initial weights, the same in every process, on the CPU."""
        return self.prepared(self.make_model())

    def model_of_settings(self):
        """Return the model of the settings, for their data set."""
        return build_model(self.s, self.dataset.classes, self.dataset.channels)

    def prepared(self, model):
        """Tell a model how to compute; its stages and copies will do the same."""
        model.precision = None if self.s.rung == "fsdp" else PRECISION[self.s.precision]  # FSDP's is its own: policy()
        model.checkpointing = self.s.activation_checkpointing
        return model

    def policy(self):
        """Return FSDP's precision: that of the settings in the rung fsdp; in others the model itself has it."""
        kind = PRECISION[self.s.precision] if self.s.rung == "fsdp" else None
        return MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if kind else None)

    def cut(self, model) -> list:
        """Return the stages of a model for the devices of this process, all of which it drives."""
        return model.cut(resolve_cut(model.names, self.s.cut, len(self.devices)))

    def local_stages(self, group=None) -> LocalStages:
        """Return this process's stages of a model that is cut over the processes of a group (default: all)."""
        schedule = "GPipe" if self.s.rung == "model_parallel" else self.s.schedule
        stages = LocalStages(self.model(), self.s, self.rank, self.device, group, schedule)
        if self.recorder:
            self.recorder.watch(stages)
        return stages

    def optimizer(self, parameters, **options):
        """Return the optimizer that the settings name, with PyTorch's own defaults where no option differs."""
        if self.s.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.s.lr, **options)
        return torch.optim.SGD(parameters, lr=self.s.lr, momentum=0.9, **options)

    def split(self, images, labels) -> list:
        """Return the parts of a batch whose gradients are accumulated: pairs (images, labels)."""
        return list(zip(*(tensor.chunk(self.s.microbatches) for tensor in (images, labels)), strict=True))

    def loaders(self, rung) -> Loaders:
        """Return the loaders of a rung's batches."""
        share = {"replicas": rung.replicas, "replica": rung.replica, "images": rung.images, "device": self.device}
        return Loaders(self.dataset, self.s.batch_size, seed=self.s.seed, workers=self.s.workers, **share)

    @contextmanager
    def observed(self):
        """Record a ``with`` block as one step, where the settings ask for a timeline or a profile."""
        with self.recorder.step() if self.recorder else nullcontext():
            yield
        if self.profiler:
            self.profiler.step()

    @contextmanager
    def observers(self):
        """Start the profiler where the settings ask for it; at the end, write what was recorded."""
        self.profiler = self.start_profiler() if self.s.profile else None
        yield
        if self.recorder:
            self.recorder.save(self.folder)
        if self.profiler:
            self.profiler.stop()

    def start_profiler(self):
        """Start PyTorch's profiler: after two steps it records as many as are asked for, and writes a trace."""
        kinds, on_gpu = [ProfilerActivity.CPU], self.device.type == "cuda"
        if on_gpu:
            kinds.append(ProfilerActivity.CUDA)
            record_memory()

        def write(recorded):
            recorded.export_chrome_trace(str(self.folder / f"trace-rank{self.rank}.json.gz"))
            if on_gpu:
                save_memory(self.folder / f"memory-rank{self.rank}.pickle")

        self.folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have made it yet
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=self.s.profile, repeat=1)
        profiler = torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=write)
        profiler.start()
        return profiler


def build_model(settings, classes=1000, channels=3):
    """Return the model of the settings, for a data set of these classes and channels."""
    shape = {"classes": classes, "channels": channels, "image_size": settings.image_size}
    return build(settings.model, **shape, norm=settings.norm, seed=settings.seed)


def local_devices(device, count) -> list:
    """Return the devices that one process drives: `count` GPUs from its own on, or `count` times the CPU."""
    if device.type != "cuda":
        return [device] * count
    first, visible = device.index, torch.cuda.device_count()
    if first + count > visible:
        raise UserError(f"{count} devices wanted from GPU {first} on, {visible} GPUs visible; lower --devices")
    return [torch.device("cuda", first + i) for i in range(count)]


def learning_rate(optimizer, settings, length):
    """Return the scheduler of the learning rate: a warm-up, then constant or along a half cosine.

    The rate depends on the step's number only, so a resumed run has that of the uninterrupted one. The cosine ends
    after `length` steps, also where the training is stopped earlier.
    """
    warmup, cosine = settings.warmup_steps, settings.lr_schedule == "cosine"
    if cosine and warmup >= length:
        what = f"--warmup-steps {warmup} leaves no step of {length} to the cosine"
        raise UserError(f"{what}; allowed: 0 to {length - 1}")

    def factor(step):  # counted from 0
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (length - warmup))) if cosine else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def compile_blocks(model):
    """Let the first step compile every block, since wrappers are then in place; equal blocks share their code."""
    compile_on_one_core()
    for block in model.blocks():
        block.compile()

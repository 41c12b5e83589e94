"""What a rung is built from: `Run`, which gives it the model, the data and the optimizer of its settings."""

import math
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch

from mpdemo.data import Loaders, load
from mpdemo.errors import UserError
from mpdemo.models import build
from mpdemo.settings import is_per_device
from mpdemo.settings.cuts import resolve_cut
from mpdemo.training.recorder import Recorder

WARMUP = 10  # steps of the learning rate's, where the settings name no number


class Run:
    """What a rung is built from: checked settings `s`, this process's `rank` of `world`, the `devices` it drives."""

    def __init__(self, settings, place, make_model=None):
        """The model is that of the settings, unless a trial brings its own."""
        self.s, self.place = settings, place
        self.model = make_model or self.model_of_settings
        self.rank, self.world, self.device = place.rank, place.world_size, place.device
        self.devices = local_devices(place.device, 1 if is_per_device(settings) else settings.devices)
        self.recorder = Recorder(self.rank, self.device) if settings.timeline else None
        self.folder = Path(settings.out)
        torch.manual_seed(settings.seed)

    @cached_property
    def dataset(self):
        """The data set of the settings."""
        return load(self.s.dataset, self.s.data, self.s.image_size, self.s.seed)

    def model_of_settings(self):
        """Return the whole model with its initial weights, the same in every process, on the CPU."""
        return build_model(self.s, self.dataset.classes, self.dataset.channels)

    def cut(self, model) -> list:
        """Return the stages of a model for the devices of this process, all of which it drives."""
        return model.cut(resolve_cut(model.names, self.s.cut, len(self.devices)))

    def local_stages(self, group=None):
        """Return this process's `LocalStages` of a model that is cut over the processes of a group (default: all)."""
        # PyTorch's pipelines and fake tensors take half as long to import as PyTorch itself.
        from mpdemo.training.stages import LocalStages

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
        share = {
            "replicas": rung.replicas,
            "replica": rung.replica,
            "images": rung.images,
            "device": self.device,
        }
        return Loaders(self.dataset, self.s.batch_size, seed=self.s.seed, **share)

    def observed(self):
        """Return a context that records a step, where the settings ask for a timeline."""
        return self.recorder.step() if self.recorder else nullcontext()

    @contextmanager
    def recording(self):
        """Write what was recorded at the end of a ``with`` block."""
        yield
        if self.recorder:
            self.recorder.save(self.folder)


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
        raise UserError(
            f"{count} devices wanted from GPU {first} on, {visible} GPUs visible; lower --devices"
        )
    return [torch.device("cuda", first + i) for i in range(count)]


def learning_rate(optimizer, settings, length):
    """Return the scheduler of the learning rate: a warm-up, then half a cosine, `length` steps in all."""
    warmup = min(WARMUP, length // 2) if settings.warmup_steps is None else settings.warmup_steps
    if warmup >= length:
        what = f"--warmup-steps {warmup} leaves no step of {length} to the cosine"
        raise UserError(f"{what}; allowed: 0 to {length - 1}")

    def factor(step):  # counted from 0
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (length - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

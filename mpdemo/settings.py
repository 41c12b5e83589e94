"""Every setting of a training run, with its default, its unit and what is allowed. Needs no PyTorch.

The command line of ``python -m mpdemo train`` is made from here, and so are job files and notebooks, which pass
settings by these names.
"""

from dataclasses import asdict, dataclass

from mpdemo.errors import UserError

RUNGS = ("single", "data_parallel", "ddp", "model_parallel", "pipeline")
FORMS = ("one-process", "per-device")
MODELS = ("toy", "convnet", "resnet18", "resnet50", "resnet101", "transformer", "convstack")
NORMS = ("batch", "group")
DATASETS = ("digits", "mnist", "imagenet", "folder")
PRECISIONS = ("fp32", "bf16", "fp16")
# one process and several devices, or one process a device; the first is the default
RUNG_FORMS = {
    "single": ("one-process",),
    "data_parallel": ("one-process",),
    "ddp": ("per-device",),
    "model_parallel": ("per-device", "one-process"),
    "pipeline": ("per-device", "one-process"),
}


@dataclass
class Settings:
    """What to train, how, and where to write it. `checked` fills in what is None."""

    rung: str = "single"
    form: str | None = None  # one-process: one process drives all devices; per-device: a process each
    model: str = "convnet"
    norm: str = "batch"
    dataset: str = "digits"
    data: str | None = None  # folder of the data set, for all but digits
    image_size: int | None = None  # pixels a side; None: 28 for digits and mnist, else 224
    batch_size: int = 128  # images a step, over all processes together
    epochs: int | None = None  # passes over the training images; None: 1
    steps: int | None = None  # stop after so many steps, whatever the epochs
    lr: float = 0.01  # learning rate of SGD with momentum 0.9
    seed: int = 0  # of the initial weights and of the order of the images
    processes: int | None = None  # outside a launcher: how many to start; None: 2 where the form wants several
    devices: int | None = None  # one-process forms: how many devices that process drives; None: 2
    microbatches: int | None = None  # parts the batch is cut into; None: 1, and for pipelines 4 a stage
    schedule: str = "1f1b"  # of the pipeline rung, per-device form
    stages_per_rank: int | None = None  # of the pipeline rung; None: what the schedule wants
    cut: str | None = None  # where to cut the model: names or numbers of blocks, comma between; None: equally many
    precision: str = "fp32"
    out: str = "runs/train"
    checkpoint_every: int | None = None  # steps; None: never
    resume: str | None = None  # run folder whose newest checkpoint to go on from
    workers: int = 0  # loader processes a rank; 0: the rank decodes its images itself
    log_every: int = 10  # steps between two looks at the losses, which wait for the device
    timeline: bool = False  # record what each rank did when (per-device pipelines)

    def as_dict(self) -> dict:
        """Return the settings as plain values."""
        return asdict(self)

    def arguments(self) -> list[str]:
        """Return the command-line words that give these settings, leaving out what is None or default."""
        words, default = [], Settings()
        for name, value in asdict(self).items():
            if value is None or value is False or (value == getattr(default, name) and name not in ("rung", "model")):
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(str(value))
        return words


def _must(condition, message):
    if not condition:
        raise UserError(message)


def checked(s: Settings, world_size: int | None = None) -> Settings:
    """Fill in the defaults that depend on other settings and refuse what cannot work.

    Parameters
    ----------
    world_size : int, optional
        Processes of the launcher, where there is one; else `processes` counts.

    Raises
    ------
    UserError
        With the value, what is allowed and what to do.
    """
    for name, allowed in [("rung", RUNGS), ("model", MODELS), ("norm", NORMS), ("dataset", DATASETS)]:
        value = getattr(s, name)
        _must(value in allowed, f"unknown {name} {value!r}; allowed: {', '.join(allowed)}")
    forms = RUNG_FORMS[s.rung]
    s.form = s.form or forms[0]
    _must(s.form in forms, f"rung {s.rung} has no form {s.form!r}; allowed: {', '.join(forms)}")
    s.epochs = 1 if s.epochs is None and s.steps is None else s.epochs
    s.image_size = s.image_size or (28 if s.dataset in ("digits", "mnist") else 224)
    for name in ("image_size", "batch_size", "epochs", "steps", "processes", "devices", "microbatches", "log_every"):
        value = getattr(s, name)
        _must(value is None or value >= 1, f"--{name.replace('_', '-')} {value} is not allowed; allowed: 1 or more")
    _must(s.checkpoint_every is None or s.checkpoint_every >= 1, "--checkpoint-every must be 1 step or more")
    _must(s.workers >= 0, f"--workers {s.workers} is not allowed; allowed: 0 or more")
    _must(s.lr > 0, f"--lr {s.lr} is not allowed; allowed: more than 0")
    recorded = s.form == "per-device" and s.rung in ("model_parallel", "pipeline")
    _must(recorded or not s.timeline, "--timeline records rungs model_parallel and pipeline in the form per-device")
    _check_processes(s, world_size)
    _check_batch(s)
    return s


def _check_processes(s, world_size):
    """Settle how many processes and devices there are."""
    if s.form == "one-process":
        started = world_size if world_size is not None else s.processes
        _must(
            started in (None, 1),
            f"rung {s.rung} in the one-process form was started as {started} processes; start 1"
            + ("" if s.rung == "single" else " (and say --devices for how many devices it drives)"),
        )
        s.processes = 1
        s.devices = 1 if s.rung == "single" else s.devices or 2
        return
    if world_size is not None and s.processes is not None and s.processes != world_size:
        raise UserError(f"--processes {s.processes} contradicts the launcher's {world_size} processes; leave it out")
    s.processes = world_size or s.processes or 2
    s.devices = s.processes


def _check_batch(s):
    """Settle the microbatches and refuse a batch that does not divide."""
    if s.rung in ("ddp", "data_parallel"):
        _must(
            s.batch_size % s.devices == 0,
            f"--batch-size {s.batch_size} (all processes together) does not divide by {s.devices} devices; "
            f"allowed: a multiple of {s.devices}, such as {max(1, s.batch_size // s.devices) * s.devices}",
        )
    if s.rung == "pipeline":
        _check_pipeline(s)
        return
    s.microbatches = s.microbatches or 1
    whole = s.rung == "single"
    _must(whole or s.microbatches == 1, f"rung {s.rung} takes no --microbatches; allowed: rungs single and pipeline")
    _must(
        s.batch_size % s.microbatches == 0,
        f"--batch-size {s.batch_size} does not divide into {s.microbatches} microbatches",
    )


def _check_pipeline(s):
    """Settle microbatches and stages of a pipeline."""
    from mpdemo.schedules import check_schedule

    if s.form == "one-process":
        s.schedule = "gpipe"  # its order is fixed: all forwards, then all backwards
    if s.microbatches is None:
        s.microbatches = next((m for m in (4 * s.devices, 2 * s.devices) if s.batch_size % m == 0), s.devices)
        s.microbatches = 1 if s.schedule == "naive" else s.microbatches
    s.stages_per_rank = check_schedule(s.schedule, s.devices, s.microbatches, s.stages_per_rank, s.batch_size)
    _must(
        s.schedule == "naive" or s.microbatches >= s.devices,
        f"{s.microbatches} microbatches are fewer than the {s.devices} devices, so some would never work; "
        f"allowed: {s.devices} or more, or --schedule naive",
    )

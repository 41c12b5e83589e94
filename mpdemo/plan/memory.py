"""Peak memory of every device of a cut model, on a machine without any GPU.

Fake tensors have a shape, a type and a device but no storage: a whole training step runs on them in seconds, and a
count of the storages that are alive is what ``torch.cuda.max_memory_allocated`` would report. What it cannot see is
memory that is no tensor: the workspaces that cuDNN and cuBLAS ask for while a convolution or a matrix product runs
(tens of MiB; they differ from run to run), and the CUDA context, which no PyTorch counter shows. `RESERVE` covers both.

Taught in notebooks/04_model_parallel.ipynb.
"""

import contextlib
from dataclasses import dataclass

from mpdemo.errors import UserError
from mpdemo.plan.storages import count_storages, move, rounded
from mpdemo.schedules import SCHEDULES, placement

MIB = 2**20
RESERVE = 768 * MIB  # of a GPU's memory, kept for the CUDA context (about 500 MiB) and for workspaces
OPTIMIZERS = ("sgd", "momentum", "adamw")


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory of one device in a training step, in bytes.

    `activations` is all of the peak that is not weights, gradients or optimizer state: saved activations, the batch,
    and what the backward pass needs for a moment.
    """

    device: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self):
        """Bytes of all four together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(
    model,
    points,
    batch,
    image_size,
    *,
    form="per-device",
    schedule="gpipe",
    microbatches=1,
    optimizer="sgd",
    keep_gradients=False,
    classes=1000,
    channels=3,
    norm="batch",
):
    """Estimate the peak memory of every device by running a training step on fake tensors.

    Parameters
    ----------
    model : str
        One of ``mpdemo.models.NAMES``.
    points : list of int
        Where the model is cut, as ``mpdemo.models.resolve_cut`` gives it.
    batch : int
        Samples of the whole batch.
    image_size, classes, channels, norm
        Of the data and the model, as in ``mpdemo.models.build``.
    form : {"per-device", "one-process"}
        One process a device (the library's schedule is run, with a process group that delivers nothing), or one
        process that moves activations between devices, all forwards before all backwards.
    schedule, microbatches : str, int
        Of the pipeline. The form "one-process" knows no other schedule than gpipe.
    optimizer : {"sgd", "momentum", "adamw"}
        What keeps state: nothing, one value or two values a parameter.
    keep_gradients : bool
        Whether ``zero_grad`` fills the gradients with zeros instead of dropping them.

    Returns
    -------
    list of DeviceMemory
        One a device.

    Raises
    ------
    UserError
        An unknown form, optimizer or schedule.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mpdemo.models import build

    one_of("optimizer", optimizer, OPTIMIZERS)
    one_of("form", form, ("per-device", "one-process"))
    shape = (batch, channels, image_size, image_size)

    def blocks():
        return build(model, classes=classes, channels=channels, image_size=image_size, norm=norm)

    step = {"optimizer": optimizer, "keep_gradients": keep_gradients, "microbatches": microbatches}
    if form == "one-process":
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _one_process(blocks, points, shape, **step)
    devices = []
    for rank in range((len(points) + 1) // SCHEDULES[schedule].stages_per_rank):
        with FakeTensorMode(allow_non_fake_inputs=True):
            devices.append(_one_rank(blocks, points, shape, schedule, rank, **step))
    return devices


def one_of(what, value, allowed):
    """Raise UserError unless the value is one of those allowed."""
    if value not in allowed:
        raise UserError(f"unknown {what} {value!r}; allowed: {', '.join(allowed)}")


def _two_steps(count, parameters, forward_backward, optimizer, keep_gradients):
    """Train two steps, the second with optimizer state and old gradients in place; return the second one's peak."""
    import torch

    rule = {
        "sgd": lambda: torch.optim.SGD(parameters, 0.1, foreach=False),
        "momentum": lambda: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False),
        "adamw": lambda: torch.optim.AdamW(parameters, 0.1, foreach=False),
    }[optimizer]()
    for _ in range(2):
        count.peak = dict(count.live)
        rule.zero_grad(set_to_none=not keep_gradients)
        forward_backward()
        rule.step()
    return rule


def _one_process(blocks, points, shape, optimizer, keep_gradients, microbatches):
    import torch

    with count_storages() as count:
        stages = blocks().cut(points)
        devices = [torch.device("cpu", number) for number in range(len(stages))]  # any devices that are told apart
        for stage, device in zip(stages, devices, strict=True):
            move(stage, device)

        def forward_backward():
            held = list(torch.empty(shape, device=devices[0]).chunk(microbatches))
            for tick in range(microbatches + len(stages) - 1):
                for s in reversed(range(len(stages))):
                    if 0 <= tick - s < microbatches:
                        held[tick - s] = stages[s](held[tick - s].to(devices[s]))
            labels = torch.zeros(shape[0], dtype=torch.long, device=devices[-1])
            torch.nn.functional.cross_entropy(torch.cat(held), labels).backward()

        parameters = [p for stage in stages for p in stage.parameters()]
        rule = _two_steps(count, parameters, forward_backward, optimizer, keep_gradients)
        return [
            _split(number, stage, rule, count.peak[str(device)])
            for number, (stage, device) in enumerate(zip(stages, devices, strict=True))
        ]


def _one_rank(blocks, points, shape, schedule, rank, optimizer, keep_gradients, microbatches):
    import torch
    from torch.distributed import pipelining

    owners = placement(schedule, (len(points) + 1) // SCHEDULES[schedule].stages_per_rank)
    with _lonely_group(rank, 1 + max(owners)), count_storages() as count:
        parts = blocks().cut(points)
        examples = _examples(parts, (shape[0] // microbatches, *shape[1:]))
        mine = [s for s, owner in enumerate(owners) if owner == rank]
        held = torch.nn.ModuleList(parts[s] for s in mine)
        stages = [pipelining.PipelineStage(parts[s], s, len(parts), torch.device("cpu"), *examples[s]) for s in mine]
        del parts, examples  # the other ranks' stages are not on this device
        runner = getattr(pipelining, SCHEDULES[schedule].library_class)(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=microbatches,
            loss_fn=torch.nn.functional.cross_entropy,
        )

        def forward_backward():
            images = (torch.empty(shape),) if owners[0] == rank else ()
            last = {"target": torch.zeros(shape[0], dtype=torch.long), "losses": []} if owners[-1] == rank else {}
            runner.step(*images, **last)

        rule = _two_steps(count, list(held.parameters()), forward_backward, optimizer, keep_gradients)
        return _split(rank, held, rule, count.peak["cpu"])


@contextlib.contextmanager
def _lonely_group(rank, size):
    """Be rank `rank` of a process group that delivers nothing and waits for nothing (PyTorch's own, for its tests)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("memory of one process a device cannot be estimated inside a training process; use another")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _examples(parts, shape):
    """Return an input and an output of every stage, which tell the library what to send."""
    import torch

    examples, x = [], torch.empty(shape)
    for number, part in enumerate(parts):
        with torch.no_grad():
            y = part(x)
        examples.append((x.clone().requires_grad_(number > 0), y.clone().requires_grad_()))
        x = y
    return examples


def _split(number, module, rule, peak):
    """Say what the peak consists of."""
    parameters = list(module.parameters())
    weights = sum(rounded(tensor.nbytes) for tensor in (*parameters, *module.buffers()))
    gradients = sum(rounded(p.nbytes) for p in parameters)
    state = [value for p in parameters for value in rule.state.get(p, {}).values() if hasattr(value, "numel")]
    optimizer = sum(rounded(value.nbytes) for value in state)
    return DeviceMemory(number, weights, gradients, optimizer, peak - weights - gradients - optimizer)

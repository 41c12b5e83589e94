"""Lets an unchanged CUDA script run on CPU processes: each of them stands for a rank with one GPU."""

import contextlib
import functools
import inspect
import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
from torch import cuda, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from . import private_torch, sketch
from .notes import ORDER, note_once

REAL = torch.device
CPU = REAL("cpu")
GIB = 2**30
DRAWS = {*vars(nn.init), "random_", "bernoulli_"}  # what fills a tensor, by chance or not


def cpu_for(device):
    """Return the CPU for a GPU; other values as they are."""
    is_gpu = (
        type(device) is int or isinstance(device, str | REAL) and str(device).partition(":")[0] == "cuda"
    )
    return CPU if is_gpu else device


def standing_for(real, make):
    """Return a class in the place of one that cannot be changed: its instances are the same, and ``make`` makes them.

    A class, since annotations such as ``torch.Generator | None`` are computed at imports.
    """

    class Kind(type):
        def __instancecheck__(cls, thing):
            return isinstance(thing, real)

        def __call__(cls, *args, **options):
            return make(*args, **options)

    return Kind(real.__name__, (), {})


class OnCPU(TorchFunctionMode):
    """Gives every function of PyTorch that takes a device the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "is_pinned":
            return True
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = cpu_for(kwargs["device"])
        if name in ("to", "type"):
            args = (*args[:1], *map(cpu_for, args[1:]))
        # `nn.init` hands over its functions with names
        drawn = args[0] if args else kwargs.pop("tensor", None)
        if name in DRAWS and hasattr(drawn, "placements"):
            return draw_whole(function, drawn, *args[1:], **kwargs)
        return function(*args, **kwargs) if args or drawn is None else function(drawn, **kwargs)


@torch.no_grad()
def draw_whole(function, tensor, *args, **options):
    """Draw a sharded tensor as GPUs do, where all ranks draw the whole of it."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    function(full, *args, **options)
    tensor.to_local().copy_(full[sketch.slices_of(tensor)])
    return tensor


class Stream(contextlib.nullcontext):
    """Stands for a CUDA stream, on which a CPU does all work in order, and for an event, which takes the time."""

    def __init__(self, *_, **__):
        super().__init__(self)
        self.time = 0.0

    def record(self, *_):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)

    def record_event(self, event=None):
        return event or Stream()

    def done(self, *_):
        return True

    query = wait = synchronize = wait_stream = wait_event = done


def returning(value):
    """Return a function of its own that returns a value: PyTorch's compiler refuses one object under two names."""
    return lambda *_, **__: value


def functions_of(module) -> list:
    """Return the names of a module's own public functions."""
    functions = [
        thing for thing in vars(module).items() if inspect.isfunction(thing[1]) and thing[0][0] != "_"
    ]
    return [name for name, function in functions if function.__module__.startswith(module.__name__)]


def for_the_script(owner, name, answer):
    """Answer the script, and leave PyTorch's own modules the truth: they would call the driver."""
    real = getattr(owner, name)

    def asked(*args, **options):
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return (real if caller == "torch" else answer)(*args, **options)

    setattr(owner, name, asked)


def install(devices):
    """Put all of it in place, before the script runs."""
    replace_cuda(devices)
    replace_devices()
    replace_precision()
    replace_processes()
    OnCPU().__enter__()  # of this thread, to its end


def replace_cuda(devices):
    """Make torch.cuda answer as if this process had a GPU; what is not named here answers 0, and does nothing."""
    rank = int(os.environ["LOCAL_RANK"])
    for name, value in {"is_available": True, "is_bf16_supported": True, "device_count": devices}.items():
        for_the_script(cuda, name, returning(value))
    answers = {
        "get_device_properties": SimpleNamespace(
            name="CPU", total_memory=80 * GIB, major=9, minor=0, multi_processor_count=100
        ),
        "memory_stats": {},
        "current_device": rank,
        "get_device_name": "CPU",
        "get_device_capability": (9, 0),
        "mem_get_info": (80 * GIB, 80 * GIB),
        "get_rng_state": torch.get_rng_state(),  # a GPU's own: nothing is drawn from it here
        "get_rng_state_all": [torch.get_rng_state()] * devices,
    }
    for name in set(functions_of(cuda)) - {"cudart"}:
        setattr(cuda, name, returning(answers.get(name, 0)))
    answers = {"is_available": True, "device_count": devices, "current_accelerator": REAL("cuda")}
    for name in functions_of(torch.accelerator):
        for_the_script(
            torch.accelerator, name, returning((answers | {"current_device_index": rank}).get(name, 0))
        )
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, returning(None))
    cuda.Event = cuda.Stream = Stream
    cuda.device = cuda.stream = cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    private_torch.forget_driver(returning(None))


def replace_devices():
    """Put the CPU in the place of each GPU that a script names."""
    load, default, generator = torch.load, torch.set_default_device, torch.Generator

    def device(*args, **options):
        first = next(iter((*args, *options.values())))
        return CPU if cpu_for(first) is CPU else REAL(*args, **options)

    torch.device = standing_for(REAL, device)
    torch.Generator = standing_for(generator, lambda device="cpu": generator(cpu_for(device)))
    torch.load = lambda f, map_location=None, **options: load(f, map_location="cpu", **options)
    torch.set_default_device = lambda device: default(cpu_for(device))
    torch.Tensor.is_cuda = property(lambda _: True)


def replace_precision():
    """Compute in float32: a comparison needs no speed."""
    autocast, scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def cast(self, device_type="cuda", *args, **options):
        if device_type == "cuda":
            args, options = (), {"dtype": torch.bfloat16, "enabled": False}
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **options)

    torch.autocast.__init__ = cast  # and those of torch.cuda.amp, which are made of them
    torch.amp.GradScaler.__init__ = lambda self, *_, **__: scaler(self, "cpu", enabled=False)


def replace_processes():
    """Let the processes speak by gloo, and leave GPUs out of wrappers."""
    begin, group, barrier = dist.init_process_group, dist.new_group, dist.barrier
    mesh, backend, wrap = device_mesh.init_device_mesh, dist.get_backend, DistributedDataParallel.__init__

    def init(backend=None, *args, device_id=None, pg_options=None, **options):
        return begin("gloo", *args, **options)

    @functools.wraps(wrap)
    def wrapped(self, module, device_ids=None, output_device=None, *args, **options):
        wrap(self, module, None, None, *args, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init
    dist.new_group = lambda *args, backend=None, pg_options=None, **options: group(*args, **options)
    dist.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)
    dist.is_nccl_available = returning(True)
    for_the_script(dist, "get_backend", lambda group=None: backend(group).replace("gloo", "nccl"))
    device_mesh.init_device_mesh = dist.init_device_mesh = lambda kind, *args, **options: mesh(
        "cpu", *args, **options
    )
    DistributedDataParallel.__init__ = wrapped


def averaging(function):
    """Let a collective compute a mean, which some versions of gloo refuse, and others take for a sum."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def reduced(*args, **options):
        given = signature.bind(*args, **options).arguments
        if given.get("op") == dist.ReduceOp.AVG:
            given["op"], size = dist.ReduceOp.SUM, dist.get_world_size(given.get("group"))
            if "input" in given:
                given["input"] = given["input"] / size
            else:
                given["tensor"].div_(size)
        return function(**given)

    return reduced


def replace_gloo():
    """Let CPU processes compute what only GPUs do, or only newer versions: SyncBatchNorm, and means in collectives."""
    if ORDER["device"] == "cpu" or not torch.cuda.is_available():
        private_torch.allow_sync_norm()
        nn.SyncBatchNorm.forward = normalize
        for name in ("all_reduce", "reduce_scatter_tensor"):
            averaged = averaging(getattr(dist, name))
            setattr(dist, name, averaged)
            setattr(dist.distributed_c10d, name, averaged)


def normalize(norm, x):
    """Normalize the rows of all ranks, and return this rank's; those of this rank alone, where the real one does."""
    several = dist.is_initialized() and dist.get_world_size(norm.process_group) > 1
    if not (norm.training and several) or "batchnorm" in ORDER["without"]:
        return nn.BatchNorm1d.forward(norm, x)
    note_once("emulated", "SyncBatchNorm")
    group = norm.process_group or dist.group.WORLD
    everything = torch.cat(all_gather(x.contiguous(), group))
    return nn.BatchNorm1d.forward(norm, everything).chunk(dist.get_world_size(group))[dist.get_rank(group)]

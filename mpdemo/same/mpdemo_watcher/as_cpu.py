"""Lets an unchanged CUDA script run on CPU processes: each of them stands for a rank with one GPU."""

import contextlib
import functools
import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

REAL = torch.device
CPU = REAL("cpu")
GIB = 2**30
NOTHING = (
    "set_device synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated ipc_collect init _lazy_init"
)
NOTHING += " manual_seed manual_seed_all set_per_process_memory_fraction reset_accumulated_memory_stats set_rng_state"
NOTHING += " set_rng_state_all set_stream reset_max_memory_cached set_sync_debug_mode"
ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved utilization"
TYPES = "Float Double Half BFloat16 Long Int Short Byte Bool"
DRAWN = "normal_ uniform_ random_ bernoulli_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_"
DRAWN += " xavier_normal_ orthogonal_"


def cpu_for(device):
    """Return the CPU for a GPU; other values as they are."""
    if type(device) is int or getattr(device, "type", str(device).partition(":")[0]) == "cuda":
        return CPU
    return device


class Kind(type):
    """The type of a class that stands for `torch.device`, which is a type that cannot be changed."""

    def __instancecheck__(cls, thing):
        return isinstance(thing, REAL)

    def __call__(cls, *args, **options):
        if args and type(args[0]) is int or str(args[0] if args else options.get("type")).partition(":")[0] == "cuda":
            return CPU
        return REAL(*args, **options)


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
        if name in ("to", "type") and len(args) > 1:
            args = (
                args[0],
                args[1] if isinstance(args[1], torch.dtype | torch.Tensor) else cpu_for(args[1]),
                *args[2:],
            )
        drawn = args[0] if args else kwargs.pop("tensor", None)  # `nn.init` hands over its functions with names
        if name in DRAWN.split() and hasattr(drawn, "placements"):
            return draw_whole(function, drawn, *args[1:], **kwargs)
        return function(*args, **kwargs) if args or drawn is None else function(drawn, **kwargs)


def draw_whole(function, tensor, *args, **options):
    """Draw a sharded tensor as GPUs do, where all ranks draw the whole of it."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    function(full, *args, **options)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    with torch.no_grad():
        part = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
        tensor.to_local().copy_(full[part])
    return tensor


class Event:
    """Stands for a CUDA event, and measures time."""

    def __init__(self, *_, **__):
        self.time = 0.0

    def record(self, *_):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)

    def done(self, *_):
        return True

    query = wait = synchronize = done


class Stream(Event):
    """Stands for a CUDA stream: on a CPU all work is done in order."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self, event=None):
        return event or Event()

    wait_stream = wait_event = Event.done


def returning(value):
    """Return a function of its own that returns a value: PyTorch's compiler refuses one object under two names."""
    return lambda *_, **__: value


def for_the_script(owner, name, value):
    """Answer the script, and leave PyTorch's own modules the truth: they would call the driver."""
    real = getattr(owner, name)

    def asked(*args, **options):
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return real(*args, **options) if caller == "torch" else value

    setattr(owner, name, asked)


def install(devices):
    """Put all of it in place, before the script runs."""
    replace_cuda(devices)
    replace_devices()
    replace_precision()
    replace_processes()
    OnCPU().__enter__()  # of this thread, to its end


def replace_cuda(devices):
    """Make torch.cuda answer as if this process had a GPU."""
    cuda, rank = torch.cuda, int(os.environ["LOCAL_RANK"])
    answers = dict.fromkeys(NOTHING.split()) | dict.fromkeys(ZERO.split(), 0)
    answers |= {"current_device": rank, "get_device_name": "CPU", "get_device_capability": (9, 0), "memory_stats": {}}
    answers |= {"mem_get_info": (80 * GIB, 80 * GIB), "memory_summary": "", "get_arch_list": []}
    device = SimpleNamespace(name="CPU", total_memory=80 * GIB, major=9, minor=0, multi_processor_count=100)
    for name, value in (answers | {"get_device_properties": device}).items():
        setattr(cuda, name, returning(value))
    for name, value in {"is_available": True, "is_bf16_supported": True, "device_count": devices}.items():
        for_the_script(cuda, name, value)
    answers = {"is_available": True, "device_count": devices, "current_accelerator": REAL("cuda")}
    answers |= {"set_device_index": None, "synchronize": None, "current_device_index": rank}
    for name, value in answers.items():
        for_the_script(torch.accelerator, name, value)
    cuda.Event, cuda.Stream = Event, Stream
    cuda.device = cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.get_rng_state, cuda.get_rng_state_all = (lambda *_: torch.get_rng_state()), (lambda: [torch.get_rng_state()])
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, returning(None))
    for name in TYPES.split():
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def replace_devices():
    """Put the CPU in the place of each GPU that a script names."""
    torch.device = Kind("device", (), {})
    load, default, generator = torch.load, torch.set_default_device, torch.Generator
    torch.load = lambda f, map_location=None, **options: load(f, map_location="cpu", **options)
    torch.set_default_device = lambda device: default(cpu_for(device))

    class Made(type):  # a class, since annotations such as `torch.Generator | None` are computed at imports
        def __instancecheck__(cls, thing):
            return isinstance(thing, generator)

        def __call__(cls, device="cpu"):
            return generator(cpu_for(device))

    torch.Generator = Made("Generator", (), {})
    torch.Tensor.is_cuda = property(lambda _: True)


def replace_precision():
    """Compute in float32: a comparison needs no speed."""
    autocast, scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def cast(self, device_type="cuda", *args, **options):
        if device_type == "cuda":
            autocast(self, "cpu", dtype=torch.bfloat16, enabled=False)
        else:
            autocast(self, device_type, *args, **options)

    torch.autocast.__init__ = cast
    torch.cuda.amp.autocast.__init__ = lambda self, *_, **__: cast(self)
    torch.amp.GradScaler.__init__ = lambda self, *_, **__: scaler(self, "cpu", enabled=False)
    torch.cuda.amp.GradScaler.__init__ = lambda self, *_, **__: scaler(self, "cpu", enabled=False)


def replace_processes():
    """Let the processes speak by gloo, and leave GPUs out of wrappers."""
    begin, group, barrier, reduce = dist.init_process_group, dist.new_group, dist.barrier, dist.all_reduce
    mesh, backend, wrap = device_mesh.init_device_mesh, dist.get_backend, DistributedDataParallel.__init__

    def init(backend=None, *args, device_id=None, pg_options=None, **options):
        return begin("gloo", *args, **options)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op != dist.ReduceOp.AVG:
            return reduce(tensor, op, group, async_op)
        reduce(tensor, dist.ReduceOp.SUM, group)  # gloo has no AVG
        tensor.div_(dist.get_world_size(group))
        return SimpleNamespace(wait=returning(True), is_completed=returning(True)) if async_op else None

    @functools.wraps(wrap)
    def wrapped(self, module, device_ids=None, output_device=None, *args, **options):
        wrap(self, module, None, None, *args, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init
    dist.new_group = lambda *args, backend=None, pg_options=None, **options: group(*args, **options)
    dist.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)
    dist.all_reduce = dist.distributed_c10d.all_reduce = all_reduce
    dist.is_nccl_available = returning(True)
    dist.get_backend = lambda group=None: backend(group).replace("gloo", "nccl") if from_script() else backend(group)
    device_mesh.init_device_mesh = dist.init_device_mesh = lambda kind, *args, **options: mesh("cpu", *args, **options)
    DistributedDataParallel.__init__ = wrapped
    sync = torch.nn.SyncBatchNorm
    sync.convert_sync_batchnorm = classmethod(
        lambda _, module, process_group=None: module
    )  # it needs GPUs: see the note
    sync.forward = torch.nn.BatchNorm1d.forward
    sync._check_input_dim = lambda *_: None


def from_script() -> bool:
    """Whether the caller of the function that asks is no module of PyTorch."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != "torch"

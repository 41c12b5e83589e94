"""Measure training steps in bf16, one option added after the other: a row of JSON per variant, as soon as it is known.

    python tests/gpu/throughput.py gpt ROWS       tokens per second of a GPT of about 1 billion parameters
    python tests/gpu/throughput.py resnet ROWS    images per second of ResNet-50 at 224 px

The batch is the largest with which plain eager PyTorch fits, and stays the same, so that variants can be compared. An
option that fails is recorded and left out of the variants that follow. Without a GPU everything is small.
"""

import gc
import itertools
import sys
import traceback

import torch
from gpt import GPT
from record import append
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import get_model

from mpdemo.errors import error_line
from mpdemo.measure import paired
from mpdemo.tools.plan.gpus import GPUS, named
from mpdemo.world import clock

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MEMORY = torch.cuda.mem_get_info()[0] if ON_GPU else 0  # bytes that are free before anything is built
FILL = 0.9  # of it: a fuller card makes PyTorch free and allocate again in every step, which costs time
WARMUP, STEPS = (3, 12) if ON_GPU else (1, 3)
# 1.01 billion parameters
LARGE = {"layers": 18, "width": 2048, "heads": 16, "length": 2048, "vocabulary": 50304}
MEDIUM = LARGE | {"layers": 24, "width": 1024}  # 0.36 billion, for cards below LEAST
SMALL = {"layers": 4, "width": 128, "heads": 4, "length": 64, "vocabulary": 512}
LEAST = 36 * 2**30  # bytes for the large one: AdamW in float32 alone takes 16 of each parameter
BACKEND = "inductor" if ON_GPU else "aot_eager"  # the second needs no C++ compiler, and no half a minute


class Language:
    """A GPT on random tokens."""

    options = ("checkpointing", "compile", "fused")
    unit, first, last = "tokens", *((1, 16) if ON_GPU else (2, 2))  # the batches that are tried
    size = SMALL if not ON_GPU else LARGE if MEMORY > LEAST else MEDIUM
    name, per_item = "gpt", size["length"]

    def build(self, options):
        return GPT(**self.size, checkpointing="checkpointing" in options)

    def batch(self, count, options):
        tokens = torch.randint(self.size["vocabulary"], (count, self.size["length"] + 1))
        return tokens[:, :-1], tokens[:, 1:]


class Classifier(nn.Module):
    """A network and its loss."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images, labels):
        return cross_entropy(self.network(images), labels)

    def parts(self):
        """All at once: blocks of many shapes would each be compiled, and PyTorch stops after eight."""
        return [self]


class Images:
    """A ResNet on random images. No checkpointing: batch norm would count each batch twice in its statistics."""

    options = ("channels_last", "compile", "fused")
    unit, first, last = "images", *((32, 512) if ON_GPU else (4, 4))
    name, pixels, per_item = ("resnet50", 224, 1) if ON_GPU else ("resnet18", 64, 1)
    size = {"image_size": pixels}

    def build(self, options):
        return Classifier(get_model(self.name)).to(memory_format=self.form(options))

    def batch(self, count, options):
        images = torch.randn(count, 3, self.pixels, self.pixels).to(memory_format=self.form(options))
        return images, torch.randint(1000, (count,))

    def form(self, options):
        return torch.channels_last if "channels_last" in options else torch.contiguous_format


def training(case, options, count):
    """Build a model with some options; return a function that does one step and returns its loss."""
    torch.manual_seed(0)
    with DEVICE:
        model, batch = case.build(options), case.batch(count, options)
    if "compile" in options:
        for part in model.parts():
            part.compile(backend=BACKEND, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused="fused" in options or None)

    def step():
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.optimizer = optimizer
    return step


def release():
    """Give back the memory of the model before. Call it where no exception is handled, whose frames hold tensors."""
    gc.collect()
    torch._dynamo.reset()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def fits(case, count) -> bool:
    """Whether two steps of plain eager PyTorch fit into the memory; the second begins with the optimizer's state."""
    release()
    try:
        step = training(case, (), count)
        step(), step()
        clock.wait(DEVICE)
        return not ON_GPU or torch.cuda.max_memory_allocated() < FILL * MEMORY
    except RuntimeError as error:  # PyTorch's OutOfMemoryError, or what cuBLAS and cuDNN raise instead
        print(f"batch {count}: {error_line(error)}", flush=True)
        return False


def largest_batch(case) -> int:
    """Double the batch while it fits, then try the middle between what fits and what does not."""
    count = case.first
    if not fits(case, count):
        raise MemoryError(f"{case.name} does not fit with a batch of {count}")
    while 2 * count <= case.last and fits(case, 2 * count):
        count *= 2
    middle = 3 * count // 2
    return middle if count < middle < case.last and fits(case, middle) else count


def flops_per_item(case) -> float:
    """Floating point operations of a step per sequence or image, forward and backward, counted without data.

    What checkpointing computes again does not count: MFU is about what the model needs.
    """
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        case.build(())(*case.batch(2, ())).backward()
    return counter.get_total_flops() / 2


def peak_of_the_device() -> tuple[float, str]:
    """Return the operations per second that the device reaches at most in bf16, and where the number comes from."""
    name = torch.cuda.get_device_name() if ON_GPU else ""
    if (part := named(name)) and "bf16" in GPUS[part].peaks:
        return GPUS[part].peaks["bf16"], f"data sheet of {name}, bf16"
    side = 8192 if ON_GPU else 512
    a, times = torch.ones(side, side, device=DEVICE, dtype=torch.bfloat16), [clock.now(DEVICE)]
    for _ in range(6):
        torch.mm(a, a)
        times.append(clock.now(DEVICE))
    seconds = min(end - begin for begin, end in itertools.pairwise(times))
    return 2 * side**3 / seconds, "measured matrix product, bf16"


def measured(case, options, count) -> dict:
    """Time the steps of a variant: a CUDA event after each, so that the host only waits at the end."""
    step, begin = training(case, options, count), clock.now(DEVICE)
    step()
    first = clock.now(DEVICE) - begin
    for _ in range(WARMUP - 1):
        step()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    times = [clock.read(DEVICE)]
    for _ in range(STEPS):
        loss = step()
        times.append(clock.read(DEVICE))
    seconds = [clock.seconds(begin, end) for begin, end in itertools.pairwise(times)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None
    return {
        "first_step_seconds": first,
        "step_seconds": seconds,
        "loss": loss.item(),
        "peak_memory_gib": memory,
    }


def main():
    case, file = {"gpt": Language, "resnet": Images}[sys.argv[1]](), sys.argv[2]
    torch.set_num_threads(torch.get_num_threads() if ON_GPU else 1)
    failed, options, flops = False, (), flops_per_item(case)
    peak, source = peak_of_the_device()
    common = {"model": case.name} | case.size | {"batch": largest_batch(case), "peak_from": source}
    common |= {"parameters": sum(p.numel() for p in case.build(()).parameters()), "flops_per_item": flops}
    for option in (None, *case.options):
        tried = (*options, option) if option else ()
        release()
        row = common | {"options": tried}
        try:
            row |= measured(case, tried, common["batch"])
            median, *interval = paired.ratio(row["step_seconds"], [1.0] * STEPS)
            row |= {
                "median_seconds": median,
                "interval_seconds": interval,
                "least_seconds": min(row["step_seconds"]),
            }
            row[f"{case.unit}_per_second"] = common["batch"] * case.per_item / median
            row["mfu"], options = common["batch"] * flops / median / peak, tried
        except Exception as error:  # whatever it is, the other variants are worth measuring
            row["error"], failed = error_line(error), True
            traceback.print_exc()
        append([row], file)
        speed = row.get("error") or f"{row['median_seconds']:.3f} s per step, MFU {row['mfu']:.1%}"
        print(f"{case.name}, batch {row['batch']}, {' '.join(tried) or 'eager'}: {speed}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""Runs a reader's own training script in real processes, and notes what its first ranks do. In plain PyTorch.

`PREFIX` stands in front of the script's first line, in the same process; `noted()` after its end.

In a job (own_job.py) `note_steps` stands there instead.
"""

import gc
import os
import random
import sys
import time
import zlib
from collections import Counter, defaultdict

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

PROGRAM = "<program>"  # what tracebacks call the reader's script
VOCABULARY = 128  # outputs of the last Linear
# wait for the device, and bring numbers to the host
READS = "item", "tolist", "__float__", "__bool__", "__format__"
seen = Counter()
types, reads, opened, units = set(), set(), set(), set()
rows, generators = defaultdict(list), []  # of each step a number per row; what the script draws from
todo = {}  # what happens to the script


def watch(**how):
    """Begin to note the steps, and what each of them computes, reads and opens.

    After step `upset` other random numbers follow. `warn` is a rank, a signal, and the step after which it gets it.
    """
    todo.update(how)
    torch.Generator = known(torch.Generator)
    nn.modules.module.register_module_forward_hook(of_module)
    register_optimizer_step_post_hook(of_step)
    for name in READS:
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
    torch.Tensor.backward = in_backward(torch.Tensor.backward)
    nn.modules.module.register_module_parameter_registration_hook(of_parameter)
    gc.collect = lambda *_: seen.update(["collected"]) or 0  # it would be most of the time
    torch.cuda.empty_cache = torch.accelerator.empty_cache = lambda: seen.update(["emptied"])
    sys.addaudithook(lambda event, args: of_file(args[0]) if event == "open" else None)


def note_steps(pause):
    """Note the world's size and each step in the file ranNUMBER, and pause after each step."""
    notes = open(f"ran{os.environ.get('RANK', '0')}", "a", buffering=1)  # noqa: SIM115
    print(os.environ.get("WORLD_SIZE", "1"), file=notes)

    def note(optimizer, *_):
        if learns(optimizer):
            print("step", file=notes)
            time.sleep(pause)

    register_optimizer_step_post_hook(note)


def of_parameter(module, name, parameter):
    """Note how many parameters this rank builds whole, with memory."""
    if not parameter.is_meta and not isinstance(parameter, DTensor):
        seen["built"] += parameter.numel()


def known(kind):
    """Return a function that makes a generator, and keeps it in mind."""

    def make(*args, **kwargs):
        generators.append(kind(*args, **kwargs))
        return generators[-1]

    return make


def of_module(module, inputs, output):
    """Note a batch's rows, in which type a Linear computes, and whether it does so again in the backward pass."""
    if isinstance(module, nn.Embedding) and inputs[0].dim() == 2 and not seen["backward"]:
        texts = inputs[0].cpu().contiguous().numpy()
        rows[seen["steps"]] += [zlib.crc32(row.tobytes()) for row in texts]
    if isinstance(module, FSDPModule):
        units.add(id(module))
    if isinstance(module, nn.Linear):
        types.add(str(output.dtype).removeprefix("torch."))
        seen["recomputed"] += seen["backward"]
        if module.out_features == VOCABULARY and not seen["backward"]:
            seen["tokens"] += inputs[0].numel() // module.in_features


def learns(optimizer) -> bool:
    """Whether a step has a learning rate: get_state_dict makes one without."""
    return any(group["lr"] for group in optimizer.param_groups)


def of_step(optimizer, *_):
    """Note a step; of the first one, what this rank stores."""
    if not learns(optimizer):
        return
    seen["steps"] += 1
    if seen["steps"] == 1:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            seen.update(
                stored=own.numel(),
                parameters=parameter.numel(),
                low=own.numel() * (own.dtype != torch.float32),
            )
    if seen["steps"] == todo.get("upset"):
        for seed in (torch.manual_seed, random.seed, *(generator.manual_seed for generator in generators)):
            seed(99)
    rank, number, step = todo.get("warn", (None, None, None))
    if seen["steps"] == step and int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), number)


def reading(function):
    """Return a method of a tensor that notes the step where the reader's script calls it for a real number."""

    def read(tensor, *args):
        if sys._getframe(1).f_code.co_filename == PROGRAM and tensor.is_floating_point():
            reads.add(seen["steps"])
        return function(tensor, *args)

    return read


def in_backward(function):
    """Return `Tensor.backward` that notes the loss, and how long it lasts."""

    def backward(loss, *args, **kwargs):
        seen.update(backwards=1, losses=float(loss.detach()))
        seen["backward"] = 1
        function(loss, *args, **kwargs)
        seen["backward"] = 0

    return backward


def of_file(path):
    """Note the step in which the text is opened."""
    if str(path).endswith("text.txt"):
        opened.add(seen["steps"])


def noted() -> dict:
    """Return what was noted."""
    return dict(seen) | {
        "types": sorted(types),
        "reads": len(reads),
        "opened": len(opened),
        "units": len(units),
        "rows": [sorted(found) for _, found in sorted(rows.items())],
    }

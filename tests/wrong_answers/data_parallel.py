"""Typical wrong answers to the exercises of notebook 02."""

OUTPUTS = """
import torch
from concurrent.futures import ThreadPoolExecutor

def outputs_of(w, x, devices):
    parts = x.chunk(devices)
    copies = [w.clone() for _ in parts]
    with ThreadPoolExecutor(devices) as threads:
        outputs = list(threads.map(torch.mul, copies, parts))
    return torch.cat(outputs)
"""
REPLICATE = """
import torch

@torch.no_grad()
def replicate(model, *copies):
    for other in copies:
        for target, source in zip(other.state_dict().values(), model.state_dict().values()):
            target.copy_(source)
"""
GRADIENTS = """
import copy
import torch

def gradients(model, images, labels, devices):
    copies = [model] + [copy.deepcopy(model) for _ in range(devices - 1)]
    outputs = [replica(part) for replica, part in zip(copies, images.chunk(devices))]
    loss = torch.nn.functional.cross_entropy(torch.cat(outputs), labels)
    loss.backward()
    for first, *others in zip(*(replica.parameters() for replica in copies)):
        first.grad = sum((other.grad for other in others), first.grad)
"""
PAUSES = {"matrix product": 0, "sum(range(n))": 1000, "Python loop": 5}
JOB = {"processes_per_node": 1, "gpus_per_process": 4, "devices": 4}


def no_warm_up(step, base, factor, warmup):
    return base * factor


def from_the_small_rate(step, base, factor, warmup):
    return base + base * (factor - 1) * min(1, (step + 1) / max(1, warmup))


def starts_at_zero(step, base, factor, warmup):
    return base * factor * min(1, step / warmup)


def never_stops(step, base, factor, warmup):
    return base * factor * (step + 1) / warmup


def of_the_small_batch(step, base, factor, warmup):
    return base * min(1, (step + 1) / warmup)


def divides_by_zero(step, base, factor, warmup):
    return base * factor * min(1, (step + 1) / warmup)


def prints(step, base, factor, warmup):
    print(base * factor)


WRONG = {
    "02.1": [4.5, 5, 3],
    "02.2": [
        OUTPUTS.replace("x.chunk", "x.split"),
        OUTPUTS.replace("w.clone()", "w"),
        OUTPUTS.replace("w.clone()", "w.detach().clone()"),
        OUTPUTS.replace("list(threads.map(torch.mul, copies, parts))", "[c * p for c, p in zip(copies, parts)]"),
        OUTPUTS.replace("torch.cat(outputs)", "torch.cat(outputs[::-1])"),
        OUTPUTS.replace("torch.cat(outputs)", "outputs"),
        OUTPUTS.replace("torch.cat(outputs)", "w * x"),
        "def outputs_of(w, x, devices):\n    return w * x\n",
    ],
    "02.3": [
        REPLICATE.replace("state_dict().values()", "parameters()"),
        REPLICATE.replace("target.copy_(source)", "target.data = source.data"),
        REPLICATE.replace("for other in copies", "for other in copies[:1]"),
        REPLICATE.replace("@torch.no_grad()", "").replace("state_dict().values()", "parameters()"),
        REPLICATE.replace("state_dict().values()", "parameters()").replace(
            "target.copy_", "target.data = source.data #"
        ),
    ],
    "02.4": [
        GRADIENTS.rpartition("    for")[0],
        GRADIENTS + "        first.grad /= devices\n",
        GRADIENTS.replace("first.grad = sum((other.grad for other in others), first.grad)", "first.grad = None"),
        GRADIENTS.replace("first.grad)", "0 * first.grad)"),
    ],
    "02.5": [[-1.18, -0.78, 0.78, 1.18], [0, 2, 10, 12], [-1, 1], [-0.5, 0.5, -0.5, 0.5]],
    "02.6": [
        PAUSES | {"sum(range(n))": 5},
        PAUSES | {"matrix product": 1000},
        PAUSES | {"Python loop": 1000},
        PAUSES | {"Python loop": 0},
        PAUSES | {"sum(range(n))": 0},
    ],
    "02.7": [
        JOB | {"processes_per_node": 4, "gpus_per_process": 1},
        JOB | {"gpus_per_process": 1},
        JOB | {"devices": 1},
        JOB | {"processes_per_node": 4},
    ],
    "02.8": [8, 5, 0.3, 30, 4.5],
    "02.9": [700, 800, 1600, 100],
    "02.10": [600, 2400, 160],
    "02.11": [
        no_warm_up,
        starts_at_zero,
        never_stops,
        of_the_small_batch,
        divides_by_zero,
        prints,
        from_the_small_rate,
    ],
}

"""A learner's versions of DDP on the course model, in the ranks of a notebook: right gradients, and the time of a step.

Used in notebooks/21_ddp_by_hand.ipynb. A version is a function that is called with the model after the backward pass,
or a class whose object is made with the model and has ``finish()``, or ``DistributedDataParallel``.
"""

import copy
import random
from functools import partial
from statistics import median
from time import perf_counter

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mpdemo import data, models, paths
from mpdemo.measure.paired import ROUNDS, ratio
from mpdemo.notebook.check import is_blank


class Versions:
    """Every version with a copy of the course model, and one device's gradients of 16 images."""

    def __init__(self, ways):
        images, labels = (tensor[:16] for tensor in data.load("digits").train.tensors)
        half = slice(dist.get_rank(), None, dist.get_world_size())
        single = models.build("transformer")
        self.batch, self.models, self.steps = (images[half], labels[half]), {}, {}
        for name, way in (ways | answer()).items():
            self.models[name] = copy.deepcopy(single)
            self.steps[name] = partial(self.step, *_prepared(way, self.models[name]))
        cross_entropy(single(images), labels).backward()
        self.right = [parameter.grad for parameter in single.parameters()]

    def step(self, forward, finish):
        """Compute the gradients of this rank's half, and average them."""
        images, labels = self.batch
        forward.zero_grad()
        cross_entropy(forward(images), labels).backward()
        finish()

    def off(self) -> dict:
        """Return the largest relative difference of a gradient from one device's, by version."""
        for step in self.steps.values():
            step()
        return {
            name: max(map(_apart, self.right, model.parameters())) for name, model in self.models.items()
        }

    def time(self):
        """Time a step of all versions in rounds of random order, and print them beside PyTorch's."""
        seconds = {name: [] for name in self.steps}
        for number in range(-2, ROUNDS):  # two rounds to warm up
            for name in random.Random(number).sample(list(seconds), len(seconds)):
                dist.barrier()
                begin = perf_counter()
                self.steps[name]()
                dist.barrier()
                seconds[name] += [perf_counter() - begin] * (number >= 0)
        for name, own in seconds.items() if dist.get_rank() == 0 else ():
            print(
                f"{name:8} {1000 * median(own):4.0f} ms, {ratio(own, seconds['PyTorch'])} times PyTorch's"
            )


def answer() -> dict:
    """Return the learner's own version, the answer to 21.1, if there is one."""
    path, names = paths.root() / "work" / "21.1.py", {}
    if not path.exists() or is_blank(path):
        return {}
    exec(path.read_text(), names)
    return {"yours": lambda model: names["MyDDP"](model, 2**20)}


def _prepared(way, model):
    """Return what computes the forward pass, and what to call after the backward pass."""
    if way is DistributedDataParallel:
        return way(model), int
    if isinstance(way, type):
        return model, way(model).finish
    return model, partial(way, model)


def _apart(right, parameter) -> float:
    return ((right - parameter.grad).norm() / right.norm()).item()

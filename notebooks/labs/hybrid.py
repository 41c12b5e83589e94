"""What crosses between the nodes in a step of a hybrid run, for each layout of its grid, and how long it takes.

    srun --nodes 2 --ntasks-per-node 2 python -m mpdemo.labs.hybrid runs/06_layouts

The bytes are those that the kernel of each node has sent over its network, headers and all. Where all processes are on
one node nothing crosses. Taught in notebooks/06_hybrid.ipynb.
"""

import socket
import sys

import psutil
import torch

from mpdemo import models, paired
from mpdemo.compare import Comparison, rest, write_result
from mpdemo.settings import Settings
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

STEPS = 3  # whose bytes are counted
LAYOUTS = {"inside": "dp-pp", "across": "pp-dp"}  # of a replica: in one node, or over the nodes
MODELS = ("transformer", "convstack")  # many weights and small activations, and the other way round
GRID = {"rung": "hybrid", "batch_size": 64, "image_size": 28, "cut": "block.3", "microbatches": 4, "replicas": 2}


def measure(world, name) -> dict:
    """Time a model's layouts alternately; return of each the `seconds` of its steps, the MB `sent`, and sizes.

    A MB is a million bytes, of all nodes in a step. The sizes are the number of the model's `weights`, and the numbers
    of an `activation`, one image's at the cut.
    """
    model = models.build(name, classes=1000, channels=3, image_size=28)
    first = model.stage(0, model.names.index(GRID["cut"]) + 1)
    activation = first(torch.zeros(1, *model.input_shape)).numel()
    sizes = {"weights": sum(parameter.numel() for parameter in model.parameters()), "activation": activation}
    comparison = Comparison(world, model)
    for layout, mesh in LAYOUTS.items():
        comparison.add(layout, Settings(**GRID, model=name, mesh=mesh))
    comparison.run(paired.ROUNDS, warmup=1)
    trials = comparison.trials.items()
    return {key: sizes | {"seconds": comparison.seconds[key], "sent": sent_in_a_step(trial)} for key, trial in trials}


def sent_in_a_step(trial) -> float:
    """Return the MB that all nodes send in a step; all ranks must call this."""
    before = sent_by_nodes()
    for _ in range(STEPS):
        trial.step()
    return (sent_by_nodes() - before) / STEPS / 1e6


def sent_by_nodes() -> int:
    """Return the bytes that all nodes have sent to others, each node counted once; all ranks must call this."""
    rest()
    sent = sum(card.bytes_sent for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo")
    return sum(dict(gather_objects((socket.gethostname(), sent))).values())


def layouts(world) -> dict:
    """Measure every model in both layouts; all ranks must call this."""
    return {"layouts": {name: measure(world, name) for name in MODELS}, "hosts": gather_objects(socket.gethostname())}


if __name__ == "__main__":
    end(write_result(sys.argv[1], layouts))

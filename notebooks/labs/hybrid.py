"""What crosses between the nodes in a step of a hybrid run, for each layout of its grid, and how long it takes.

    srun --nodes 2 --ntasks-per-node 2 python -m mpdemo.labs.hybrid runs/33_layouts

The bytes are those that the kernel of each node has sent over its network, headers and all. It sees none that NCCL
sends over InfiniBand, so the processes compute on CPU cores. Where all are on one node nothing crosses. Taught in
notebooks/33_replicas.ipynb.
"""

import copy
import os
import socket
import sys
from statistics import median

import psutil
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mpdemo import models
from mpdemo.measure import paired
from mpdemo.measure.compare import Comparison, write_result
from mpdemo.world.collectives import gather_objects, rest
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.processes import end

STEPS = 3  # whose bytes are counted
LAYOUTS = {"inside": ("dp", "pp"), "across": ("pp", "dp")}  # of a replica: in one node, or over the nodes
MODELS = ("transformer", "convstack")  # many weights and small activations, and the other way round
BATCH, CUT, MICROBATCHES = 64, "block.3", 4


class Hybrid:
    """Steps of a hybrid run, two replicas of two stages, in a grid whose dimensions are named in this order."""

    def __init__(self, world, stages, names):
        self.devices = [world.device]
        mesh = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=names)  # ranks fill it row by row
        replica, number = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        part = DistributedDataParallel(
            copy.deepcopy(stages[number]).to(world.device), device_mesh=mesh["dp"]
        )
        stage = PipelineStage(part, number, 2, world.device, group=mesh.get_group("pp"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy)
        self.optimizer = torch.optim.SGD(part.parameters(), lr=1e-4, momentum=0.9)
        torch.manual_seed(0)
        images, labels = torch.randn(BATCH, 3, 28, 28), torch.randint(0, 1000, (BATCH,))
        images, labels = (tensor.chunk(2)[replica].to(world.device) for tensor in (images, labels))
        self.inputs, self.targets = ((images,), {}) if number == 0 else ((), {"target": labels})

    def step(self, batch=None):
        """Do one step, always on the same batch."""
        self.optimizer.zero_grad()
        self.schedule.step(*self.inputs, **self.targets)
        self.optimizer.step()


def measure(world, name) -> dict:
    """Time a model's layouts alternately; return of each the `seconds` of its steps, the MB `sent`, and sizes.

    A MB is a million bytes, of all nodes in a step. The sizes are the number of the model's `weights`, and the numbers
    of an `activation`, one image's at the cut.
    """
    model = models.build(name, classes=1000, channels=3, image_size=28)
    stages = model.cut([model.names.index(CUT) + 1])
    activation = stages[0](torch.zeros(1, *model.input_shape)).numel()
    sizes = {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "activation": activation,
    }
    comparison = Comparison(world)
    comparison.trials = {layout: Hybrid(world, stages, names) for layout, names in LAYOUTS.items()}
    comparison.run(paired.ROUNDS, warmup=1)
    trials = comparison.trials.items()
    return {
        key: sizes | {"seconds": comparison.seconds[key], "sent": sent_in_a_step(trial)}
        for key, trial in trials
    }


def sent_in_a_step(trial) -> float:
    """Return the MB that all nodes send in a step; all ranks must call this."""
    before = sent_by_nodes()
    for _ in range(STEPS):
        trial.step()
    return (sent_by_nodes() - before) / STEPS / 1e6


def sent_by_nodes() -> int:
    """Return the bytes that all nodes have sent to others, each node counted once; all ranks must call this."""
    rest()
    sent = sum(
        card.bytes_sent for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"
    )
    return sum(dict(gather_objects((socket.gethostname(), sent))).values())


def layouts(world) -> dict:
    """Measure every model in both layouts; all ranks must call this."""
    return {
        "layouts": {name: measure(world, name) for name in MODELS},
        "hosts": gather_objects(socket.gethostname()),
    }


def compare_layouts(measured) -> list:
    """Print what `layouts` has measured; return the MB counted and sent, of each row, where there were two nodes."""
    pairs = []
    for name, rows in measured["layouts"].items():
        for layout, row in rows.items():
            numbers = row["weights"] if layout == "inside" else BATCH * row["activation"]
            pairs.append((2 * numbers * 4 / 1e6, row["sent"]))
            seconds = median(row["seconds"])
            told = f"{name:12}{layout:7} counted {pairs[-1][0]:4.1f} MB, sent {row['sent']:4.1f} MB"
            print(f"{told}, {seconds:.2f} s a step")
        faster = paired.ratio(rows["inside"]["seconds"], rows["across"]["seconds"])
        verdict = "a difference" if faster.differs else "no difference measured"
        print(f"{name:12}across is {faster} times as fast as inside: {verdict}")
    return pairs if len(set(measured["hosts"])) > 1 else []


if __name__ == "__main__":
    os.environ |= ON_THE_CPU
    end(write_result(sys.argv[1], layouts))

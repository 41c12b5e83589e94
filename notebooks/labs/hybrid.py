"""What crosses between the nodes in a step of a hybrid training, for each layout of its grid, and how long it takes.

    srun --nodes 2 --ntasks-per-node 2 python -m mpdemo.labs.hybrid runs/06_layouts

The bytes are those that the kernel of each node has sent over its network, headers and all. Where all processes are on
one node nothing crosses. Taught in notebooks/06_hybrid.ipynb.
"""

import socket
import sys
from dataclasses import replace
from pathlib import Path

from mpdemo.compare import Comparison, rest, write_result
from mpdemo.settings import Settings
from mpdemo.training.summary import parameters
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

STEPS = 3
LAYOUTS = {"inside": "dp-pp", "across": "pp-dp"}  # of a replica: in one node, or over the nodes
MODELS = {  # many weights and small activations, and the other way round
    "transformer": Settings(rung="hybrid", model="transformer", batch_size=64, image_size=28, cut="block.3"),
    "convstack": Settings(rung="hybrid", model="convstack", batch_size=64, image_size=28, cut="block.3"),
}


def sent_bytes(table="/proc/net/dev") -> int:
    """Return how many bytes this node has sent over its network since it started, without those to itself.

    Parameters
    ----------
    table : str or Path
        The kernel's counters: a line ``NAME: received... sent...`` for each interface, 8 numbers for each direction.
    """
    rows = [line.split(":") for line in Path(table).read_text().splitlines()[2:]]
    return sum(int(numbers.split()[8]) for name, numbers in rows if name.strip() != "lo")


def measure(world, settings) -> dict:
    """Do some steps; return what was measured, and the sizes of the model.

    Returns
    -------
    dict
        `seconds` of a step, and the MB (millions of bytes) that all nodes `sent` in it; the model's `weights`, and the
        numbers of an `activation`, that of one image at the cut.
    """
    comparison = Comparison(world)
    rung = comparison.add("hybrid", replace(settings, microbatches=4, replicas=2)).rung
    comparison.run(0, warmup=1)
    before = sent_by_nodes()
    comparison.run(STEPS, warmup=0)
    sent = (sent_by_nodes() - before) / STEPS / 1e6
    sizes = {"weights": parameters(rung), "activation": rung.shapes[1][0][0].numel()}
    return {"seconds": comparison.median("hybrid"), "sent": sent} | sizes


def sent_by_nodes() -> int:
    """Return the bytes that all nodes have sent, each counted once; all ranks must call this."""
    rest()
    return sum(dict(gather_objects((socket.gethostname(), sent_bytes()))).values())


def layouts(world) -> dict:
    """Measure every model in both layouts; all ranks must call this."""
    results = {
        model: {name: measure(world, replace(settings, mesh=mesh)) for name, mesh in LAYOUTS.items()}
        for model, settings in MODELS.items()
    }
    return {"layouts": results, "hosts": gather_objects(socket.gethostname())}


def main(out):
    """Measure in every process; rank 0 writes the results."""
    write_result(out, layouts)


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

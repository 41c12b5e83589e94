"""Whether the plan holds: memory and messages of every rung, predicted from the settings, beside what is counted.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.predictions runs/predictions

Every process takes part; rank 0 writes ``summary.json`` in the folder. Nothing is timed, so a busy machine counts the
same. A part of `make bench`.
"""

import gc
import sys

from mpdemo.measure.compare import model_and_batch
from mpdemo.measure.trial import Trial, join_world
from mpdemo.options import as_arguments
from mpdemo.predict import memory
from mpdemo.predict.counting import peak_of_a_step, sent_in_a_step
from mpdemo.settings import Settings, checked, recipe
from mpdemo.training.log import RunLog
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

HALVES = {"schedule": "1F1B", "cut": None}  # one stage per device
TWICE = {"activation_checkpointing": True}
BF16 = {"precision": "bf16"}
CONVNET = {"model": "convnet", "norm": "group"}
CASES = {  # processes -> settings, as changes of the course model's
    2: [
        {"rung": "ddp"},
        {"rung": "ddp", "microbatches": 4},
        {"rung": "ddp", **TWICE},
        {"rung": "ddp", **CONVNET},
        {"rung": "ddp", "model": "convnet"},  # batch norm: its averages are sent, too
        {"rung": "fsdp"},
        {"rung": "fsdp", "microbatches": 4, **TWICE},
        {"rung": "fsdp", **BF16},
        {"rung": "tensor"},
        {"rung": "tensor", "sequence_parallel": True},
        {"rung": "tensor", **BF16},
        {"rung": "tensor", "sequence_parallel": True, **BF16},
        {"rung": "model_parallel"},
        {"rung": "pipeline"},
        {"rung": "pipeline", **BF16},
        {"rung": "pipeline", **HALVES, "microbatches": 8},
        {"rung": "pipeline", **HALVES, **CONVNET},
        {"rung": "pipeline", "schedule": "ZBVZeroBubble"},
    ],
    4: [
        {"rung": "hybrid", "replicas": 2},
        {"rung": "hybrid", "replicas": 2, **HALVES},
        {"rung": "hybrid", "replicas": 2, "sharded": True},
        {"rung": "hybrid", "replicas": 2, **HALVES, "sharded": True, "microbatches": 8},
        {"rung": "tensor", "replicas": 2},
        {"rung": "tensor", "replicas": 2, "sequence_parallel": True},
    ],
}


def counted(world, settings) -> dict:
    """Return for each rank the bytes at the peak of a step, and its messages (collective -> bytes)."""
    trial = Trial(settings, world, *model_and_batch(settings))
    peak = peak_of_a_step(trial)
    messages = {kind: row["bytes"] for kind, row in sent_in_a_step(trial).items()}
    del trial
    gc.collect()
    return {"counted": gather_objects(peak), "messages": gather_objects(messages)}


def predicted(settings) -> dict:
    """Return what the plan says of checked settings, a list with an entry for each rank."""
    processes = memory.of_training(settings)
    return {
        "predicted": [device.peak for each in processes for device in each.devices],
        "predicted_messages": [each.messages for each in processes],
    }


def main(out, batch_size=64, *numbers):
    """Count in every process; rank 0 predicts when the others are done, and writes the result.

    `numbers` choose some of the cases.
    """
    with join_world() as world:
        cases, shared = CASES[world.world_size], {"batch_size": int(batch_size), "timeline": False}
        cases = [cases[int(number)] for number in numbers] or cases
        settings = [Settings(**recipe(**case, **shared)) for case in cases]
        rows = [
            {"case": " ".join(as_arguments(case))} | counted(world, wanted)
            for case, wanted in zip(cases, settings, strict=True)
        ]
    if world.rank == 0:
        for row, wanted in zip(rows, settings, strict=True):
            row |= predicted(checked(wanted, world.world_size))
    RunLog(out, world.rank == 0).finish({"rows": rows})


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

"""Whether the plan holds: memory and messages of every rung, predicted from the settings, beside what is counted.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.predictions runs/predictions

Every process takes part; rank 0 writes ``summary.json`` in the folder. Nothing is timed, so a busy machine counts the
same. Taught in notebooks/11_which_one.ipynb.
"""

import gc
import sys
from dataclasses import replace

from mpdemo.plan.counting import peak_of_a_step, sent_in_a_step
from mpdemo.labs.harness import write_result
from mpdemo.labs.ladder import model_and_batch
from mpdemo.trial import Trial
from mpdemo.notebook.story import story
from mpdemo.plan import predict
from mpdemo.settings import Settings, as_arguments
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

HALVES = {"schedule": "1F1B", "cut": None}  # one stage per device
TWICE = {"activation_checkpointing": True}
BF16 = {"precision": "bf16"}
CONVNET = {"model": "convnet", "norm": "group"}
CASES = {  # processes -> settings, as changes of the story's
    2: [
        {"rung": "ddp"},
        {"rung": "ddp", "microbatches": 4},
        {"rung": "ddp", **TWICE},
        {"rung": "ddp", **CONVNET},
        {"rung": "ddp", "model": "convnet"},  # batch norm: its averages are sent, too
        {"rung": "fsdp"},
        {"rung": "fsdp", "reshard": "never"},
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
        {"rung": "hybrid", "replicas": 2, **HALVES, "mesh": "pp-dp"},
        {"rung": "hybrid", "replicas": 2, "sharded": True},
        {"rung": "hybrid", "replicas": 2, **HALVES, "sharded": True, "microbatches": 8},
        {"rung": "tensor", "replicas": 2},
        {"rung": "tensor", "replicas": 2, "sequence_parallel": True},
    ],
}


def measure(world, cases, batch_size) -> list[dict]:
    """Return a row for each case, complete on rank 0; all ranks must call this.

    Returns
    -------
    list of dict
        ``case`` (as one types it), and for each rank ``predicted`` and ``counted`` (bytes at the worst moment of a
        step) and ``predicted_messages`` and ``messages`` (collective -> bytes in a step).
    """
    rows = []
    for changes in cases:
        settings = replace(Settings(**story(**changes)), batch_size=batch_size, timeline=False)
        trial = Trial(settings, world, *model_and_batch(settings))
        counted = peak_of_a_step(trial)
        messages = {kind: row["bytes"] for kind, row in sent_in_a_step(trial).items()}
        row = {"counted": gather_objects(counted), "messages": gather_objects(messages)}
        case = " ".join(as_arguments(changes))
        rows.append({"case": case, **row, **(predicted(trial.settings) if world.rank == 0 else {})})
        del trial
        gc.collect()
    return rows


def predicted(settings) -> dict:
    """Return what the plan says of checked settings, a list with an entry for each rank."""
    data = mpdemo.data.load(settings.dataset)
    subject = Subject(settings.model, settings.image_size, data.classes, data.channels, settings.norm)
    states = {"sgd": 1, "adamw": 2}[settings.optimizer]  # this course's SGD has momentum
    return {
        "predicted": [device.peak for device in dry_run.devices(subject, settings, states)],
        "predicted_messages": [each.messages for each in dry_run.processes(subject, settings, states)],
    }


def main(out, batch_size=64):
    """Count in every process; rank 0 writes the result."""

    def count(world):
        rows = measure(world, CASES[world.world_size], int(batch_size))
        return {"device": world.device.type, "rows": rows}

    write_result(out, count)


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

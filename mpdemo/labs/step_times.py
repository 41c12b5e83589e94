"""Are step times right that were predicted beforehand? The parts of a step are measured first, then whole steps.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.step_times runs/step_times

Every process takes part; rank 0 writes ``summary.json`` in the folder. Also a part of ``python -m mpdemo bench``.
"""

import sys
from dataclasses import replace

from mpdemo.labs.harness import Comparison, quartiles, write_result
from mpdemo.labs.ladder import model_and_batch
from mpdemo.labs.speeds import measured_speeds
from mpdemo.notebook.story import story
from mpdemo.plan import predict
from mpdemo.plan.case import Case
from mpdemo.plan.choose import choose
from mpdemo.plan.step_time import IN_TURN, seconds
from mpdemo.settings import Settings, as_arguments, checked
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

HALVES = {"cut": None, "microbatches": 4}  # one stage per device
CASES = [  # changes of the story's settings
    {"rung": "single"},
    {"rung": "single", "accumulate": 4},
    {"rung": "ddp"},
    {"rung": "ddp", "accumulate": 2},
    {"rung": "ddp", "activation_checkpointing": True},
    {"rung": "model_parallel"},
    {"rung": "pipeline", "schedule": "gpipe", **HALVES},
    {"rung": "pipeline", "schedule": "1f1b", **HALVES},
    {"rung": "pipeline", "schedule": "1f1b", **HALVES, "microbatches": 8},
    {"rung": "pipeline"},
    {"rung": "pipeline", "schedule": "zbv"},
    {"rung": "fsdp"},
    {"rung": "fsdp", "reshard": "never"},
    {"rung": "fsdp", "accumulate": 2},
    {"rung": "tensor"},
    {"rung": "tensor", "sequence_parallel": True},
]


def measure(world, rounds) -> list[dict]:
    """Return a row for each case, complete on rank 0: seconds of a step, predicted and then measured.

    All ranks must call this. The steps are timed in turn, round by round; the quartiles are those of the ratio.
    `recommended` marks the case that the plan recommends; it asks first what fits, and not what is fastest.
    `drift` is how much slower the machine has become since its parts were measured: of a device alone, or of all that
    compute at once and send nothing, for each case the one of its kind.
    """
    wanted = [replace(Settings(**story(**changes)), timeline=False) for changes in CASES]
    settings = [checked(s, world.world_size if s.rung != "single" else None) for s in wanted]
    model, batch = model_and_batch(settings[0])
    speeds = gather_objects(measured_speeds(world, model, batch, settings))[0]
    blocks = predict.blocks_of(settings[0])
    predicted = [seconds(s, blocks, speeds) for s in settings]
    comparison = Comparison(world, model, batch)
    for number, case in enumerate(wanted):
        comparison.add(number, case)
    share = replace(wanted[0], batch_size=wanted[0].batch_size // world.world_size)
    comparison.add("independent", share, everywhere=True)
    comparison.run(rounds, again=True)
    silent = replace(speeds, messages=dict.fromkeys(speeds.messages, (0, 0)))  # DDP that sends nothing
    independent = seconds(checked(replace(wanted[0], rung="ddp"), world.world_size), blocks, silent)
    alone = comparison.median(0) / predicted[0]
    together = comparison.median("independent") / independent
    best = recommended(settings[0], world.world_size)
    return [
        {
            "case": " ".join(as_arguments(changes)),
            "recommended": changes == best,
            "predicted": predicted[number],
            "measured": comparison.median(number),
            "drift": alone if settings[number].rung in IN_TURN else together,
            "quartiles": quartiles([predicted[number] / step for step in comparison.seconds[number]]),
        }
        for number, changes in enumerate(CASES)
    ]


def recommended(settings, devices) -> dict:
    """Return the settings that `mpdemo.plan.choose` recommends for the story on so many devices, as in `CASES`."""
    data = {"image_size": settings.image_size, "classes": 10, "channels": 1}
    choice = choose(Case(settings.model, settings.batch_size, devices, optimizer=settings.optimizer, **data))
    return {name: value for name, value in choice.settings.items() if name not in ("batch_size", "processes")}


def main(out, rounds=9):
    """Measure in every process; rank 0 writes the result."""
    write_result(out, lambda world: {"rows": measure(world, int(rounds)), "device": world.device.type})


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

"""One rung of the story against the single device: speed beside its bound, the timeline of a step, memory per device.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.story runs/speed_ddp ddp

Every process takes part, as in ladder.py; rank 0 writes ``summary.json`` in the folder. Its ``rows`` are the single
device's and the rung's: those of ladder.py, with the typical step's timeline and the memory of every device.
`mpdemo.notebook.ladder` makes the ladder so far from them.
"""

import sys
from dataclasses import asdict, replace

from mpdemo.errors import UserError, did_you_mean
from mpdemo.labs.ddp import time_bucket
from mpdemo.labs.harness import WARMUP, quartiles, write_result
from mpdemo.labs.ladder import compare, measured_rows
from mpdemo.trial import recorded_steps
from mpdemo.notebook.story import story
from mpdemo.plan import predict
from mpdemo.settings import RUNG_FORMS, RUNGS, Settings
from mpdemo.timeline import read
from mpdemo.timeline.observe import RecordedBuckets, observe
from mpdemo.timeline.record import Recorder
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

ROUNDS = 7


def measure(world, rung, rounds=ROUNDS) -> dict:
    """Time the single device and a rung in turn, recording both; all ranks must call this.

    Returns
    -------
    dict
        ``batch_size``, ``rounds``, ``seconds`` (name -> one number per round) and ``rows``. The speed-up of a row is
        the ratio of the medians.
    """
    base = replace(Settings(**story(rung)), timeline=False)
    climbed = [(name, RUNG_FORMS[name][0]) for name in dict.fromkeys(("single", rung))]
    comparison = compare(base, world, climbed)
    for pair in climbed:
        observe_trial(comparison.trials[" ".join(pair)], world)
    rows = measured_rows(comparison, base, rounds)
    for row in rows:
        name = f"{row['rung']} {row['form']}"
        settings = gather_objects(comparison.trials[name] and comparison.trials[name].settings)[0]
        row |= {
            "devices": settings.devices * (settings.replicas or 1),
            "step_seconds": comparison.median(name),
            "step_quartiles": quartiles(comparison.seconds[name]),
            "timeline": read.typical(recorded_steps(comparison.trials[name])[WARMUP:]),
            "memory": device_memory(settings),
        }
        if row["rung"] in ("pipeline", "hybrid"):
            row |= {"schedule": settings.schedule, "microbatches": settings.microbatches}
    return {"batch_size": base.batch_size, "rounds": rounds, "seconds": comparison.seconds, "rows": rows}


def observe_trial(trial, world):
    """Record what a trial does, unless it does so itself; None is the trial of another rank."""
    if trial is None or trial.rung.recorder:
        return
    recorder = Recorder(world.rank, world.device, alone=trial.world.world_size == 1)
    observe(trial.rung, trial.optimizer, recorder)
    if trial.settings.rung == "ddp":
        trial.rung.parallel.register_comm_hook(RecordedBuckets(recorder), time_bucket)


def device_memory(settings) -> list[dict]:
    """Estimate the peak memory of every device in a step (`mpdemo.plan.predict`), in bytes, from checked settings."""
    return [asdict(device) for device in predict.devices(settings, predict.blocks_of(settings))]


def main(out, rung, rounds=ROUNDS):
    """Measure in every process; rank 0 writes the result."""
    if rung not in RUNGS:
        raise UserError(f"no rung {rung!r}; allowed: {', '.join(RUNGS)}{did_you_mean(rung, RUNGS)}")
    write_result(out, lambda world: measure(world, rung, int(rounds)))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

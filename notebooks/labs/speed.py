"""One strategy against the single device: speed beside its upper bound, the timeline of a step, memory per device.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.speed runs/speed_ddp ddp

Every process takes part; rank 0 writes ``summary.json`` in the folder. Its ``rows`` are the single device's and the
rung's: those of `mpdemo.measure.compare`, with the typical step's timeline and each device's memory, for
`notebook.ladder`. PyTorch's profiler records that step, after the timed ones.
"""

import sys
from dataclasses import replace

from mpdemo.measure import compare
from mpdemo.measure.paired import ROUNDS, median, to_row
from mpdemo.measure.traces import typical
from mpdemo.measure.trial import Trial, record
from mpdemo.predict.counting import peak_of_a_step
from mpdemo.settings import Settings
from mpdemo.training.log import RunLog
from mpdemo.world.collectives import gather_objects
from mpdemo.world.env import join_world
from mpdemo.world.processes import end


def measure(world, rung, rounds) -> dict:
    """Time the single device and a rung alternately, then record both; all ranks must call this."""
    variants = {name: Settings(rung=name) for name in dict.fromkeys(("single", rung))}
    given = compare.model_and_batch(variants["single"])
    comparison = compare.compare(variants, world, *given)
    comparison.run(rounds, title="measuring")
    rows = compare.measured_rows(comparison, variants)
    checked = [gather_objects(trial and trial.s)[0] for trial in map(comparison.trials.get, variants)]
    for name, row, settings in zip(variants, rows, checked, strict=True):
        row |= {
            "devices": settings.devices * settings.replicas,
            "single_seconds": comparison.median("single"),
            **to_row("step_seconds", median(comparison.seconds[name])),
            "timeline": typical(record(comparison.trials[name]))["events"],
        }
        trial, copies = comparison.trials[name], 1
        # its threads can't be counted; each computes its share alone
        if settings.rung == "data_parallel" and trial:
            copies = row["devices"]
            share = replace(variants["single"], batch_size=settings.batch_size // copies)
            trial = Trial(share, world, *given)
        row["memory"] = memory(trial, copies)
        if row["rung"] in ("pipeline", "hybrid"):
            row |= {"schedule": settings.schedule, "microbatches": settings.microbatches}
    return {"seconds": comparison.seconds, "rows": rows}


def memory(trial, copies) -> list:
    """Return the four parts of each device's peak, in bytes; only the first of several copies has the optimizer.

    All ranks must call this; None is the trial of another rank.
    """
    own = [peak._asdict() for peak in peak_of_a_step(trial)] if trial else []
    own += [peak | {"optimizer": 0} for peak in own for _ in range(copies - 1)]
    return [peak for peaks in gather_objects(own) for peak in peaks]


def main(out, rung, rounds=ROUNDS):
    """Measure in every process; rank 0 writes the result."""
    with join_world() as world:
        result = measure(world, rung, int(rounds))
    RunLog(out, world.rank == 0).finish(result)


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

"""One strategy against the single device: speed beside its limit, the timeline of a step, memory per device.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.speed runs/speed_ddp ddp

Every process takes part; rank 0 writes ``summary.json`` in the folder. Its ``rows`` are the single device's and the
rung's: those of `mpdemo.compare`, with the typical step's timeline and each device's memory, for `notebook.ladder`.
"""

import sys
from dataclasses import asdict, replace

from torch import nn

from mpdemo import compare
from mpdemo.errors import UserError, did_you_mean
from mpdemo.labs.ddp import time_bucket
from mpdemo.notebook.recipe import recipe
from mpdemo.plan import memory
from mpdemo.recorder import Recorder
from mpdemo.settings import RUNGS, Settings
from mpdemo.timeline import read
from mpdemo.timeline.observe import observe, recorded_steps
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

ROUNDS = 7


def measure(world, rung, rounds=ROUNDS) -> dict:
    """Time the single device and a rung alternately, recording both; all ranks must call this.

    Returns
    -------
    dict
        ``batch_size``, ``rounds``, ``seconds`` (name -> one number per round) and ``rows``. The speed-up of a row is
        the ratio of the medians.
    """
    variants = compare.as_variants([Settings(**recipe(name)) for name in dict.fromkeys(("single", rung))])
    single = variants["single"]
    comparison = compare.compare(variants, world, *compare.model_and_batch(single))
    for name in variants:
        observe_trial(comparison.trials[name], world)
    comparison.run(rounds, title="measuring")
    rows = compare.measured_rows(comparison, variants)
    for name, row in zip(variants, rows, strict=True):
        settings = gather_objects(comparison.trials[name] and comparison.trials[name].s)[0]
        row |= {
            "devices": settings.devices * (settings.replicas or 1),
            "step_seconds": comparison.median(name),
            "step_quartiles": compare.quartiles(comparison.seconds[name]),
            "timeline": read.typical(recorded_steps(comparison.trials[name])[-rounds:]),
            "memory": device_memory(settings),
        }
        if row["rung"] in ("pipeline", "hybrid"):
            row |= {"schedule": settings.schedule, "microbatches": settings.microbatches}
    return {"batch_size": single.batch_size, "rounds": rounds, "seconds": comparison.seconds, "rows": rows}


def observe_trial(trial, world):
    """Record what a trial does, unless it does so itself; None is the trial of another rank."""
    if trial is None or trial.recorder:
        return
    recorder = Recorder(world.rank, world.device, alone=trial.world == 1)
    observe(trial, recorder)
    if trial.s.rung == "ddp":
        watch_for_ddp(lambda ddp: ddp.register_comm_hook(RecordedBuckets(recorder), time_bucket))


def watch_for_ddp(wrapped):
    """Call a function with the first `DistributedDataParallel` that computes, before it does."""

    def look(module, inputs):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            handle.remove()
            wrapped(module)

    handle = nn.modules.module.register_module_forward_pre_hook(look)


class RecordedBuckets:
    """A list for the lab of DDP, which appends the MiB of every bucket, and the clock when ready and when reduced."""

    def __init__(self, recorder):
        self.recorder = recorder

    def append(self, bucket):
        """Record the all-reduce of a bucket."""
        self.recorder.add("A", *bucket[1:])


def device_memory(settings) -> list[dict]:
    """Count the peak memory of every device in a step by a dry run (`mpdemo.plan.memory`), in bytes."""
    devices = [device for process in memory.of_training(settings) for device in process.devices]
    return [asdict(replace(device, device=number)) for number, device in enumerate(devices)]


def main(out, rung, rounds=ROUNDS):
    """Measure in every process; rank 0 writes the result."""
    if rung not in RUNGS:
        raise UserError(f"no rung {rung!r}; allowed: {', '.join(RUNGS)}{did_you_mean(rung, RUNGS)}")
    compare.write_result(out, lambda world: measure(world, rung, int(rounds)))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))

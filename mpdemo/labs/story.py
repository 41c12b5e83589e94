"""One rung of the story against the single device: speed beside its bound, the timeline of a step, memory per device.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.story runs/speed_ddp ddp

Every process takes part, as in ladder.py; rank 0 writes ``summary.json`` in the folder. Its ``rows`` are the single
device's and the rung's: those of ladder.py, with the typical step's timeline and the memory of every device.
`mpdemo.notebook.ladder` makes the ladder so far from them.
"""

import sys
from dataclasses import asdict, replace

from mpdemo import data
from mpdemo.cuts import block_names, resolve_cut
from mpdemo.errors import UserError, did_you_mean
from mpdemo.labs.ddp import time_bucket
from mpdemo.labs.harness import WARMUP, join_world, quartiles
from mpdemo.labs.ladder import compare, measured_rows
from mpdemo.notebook.story import story
from mpdemo.plan import fit, memory, placement
from mpdemo.settings import CUT_RUNGS, RUNG_FORMS, RUNGS, Settings
from mpdemo.timeline import read
from mpdemo.timeline.observe import RecordedBuckets, observe
from mpdemo.timeline.record import Recorder
from mpdemo.training.run_log import RunLog
from mpdemo.world.collectives import gather_objects

ROUNDS = 11
SHARDED_DEVICE = {"fsdp": fit.sharded_device, "tensor": fit.split_device}
STATE = {"sgd": "momentum", "adamw": "adamw"}  # this course's SGD has momentum


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


def recorded_steps(trial) -> list:
    """Return the timeline of every step of a trial, of all ranks that take part in it; all ranks must call this."""
    ranks = [steps for steps in gather_objects(trial and trial.rung.recorder.steps) if steps]
    return [read.merge(list(step)) for step in zip(*ranks, strict=True)]


def device_memory(settings) -> list[dict]:
    """Estimate the peak memory of every device in a step (`mpdemo.plan.memory`), in bytes, from checked settings."""
    s, devices = settings, settings.devices
    dataset = data.load(s.dataset, s.data, s.image_size, s.seed)
    facts = {"classes": dataset.classes, "channels": dataset.channels, "norm": s.norm}
    if s.rung in CUT_RUNGS:
        schedule = "naive" if s.rung == "model_parallel" else s.schedule
        points = resolve_cut(block_names(s.model), s.cut, len(placement(schedule, devices, s.stages_per_rank)))
        more = {"form": s.form, "schedule": schedule, "microbatches": s.microbatches, "optimizer": STATE[s.optimizer]}
        replicas = s.replicas or 1
        estimates = memory.estimate(s.model, points, s.batch_size // replicas, s.image_size, **more, **facts)
        return [asdict(device) | {"device": number} for number, device in enumerate(estimates * replicas)]
    if s.rung in SHARDED_DEVICE:
        case = fit.Case(s.model, s.batch_size, devices, optimizer=STATE[s.optimizer], image_size=s.image_size, **facts)
        return [asdict(SHARDED_DEVICE[s.rung](case)) | {"device": number} for number in range(devices)]
    states = [STATE[s.optimizer]] * devices
    if s.rung == "data_parallel":
        states[1:] = ["sgd"] * (devices - 1)  # one optimizer, on the first device
    facts |= {"microbatches": s.microbatches, "keep_gradients": s.rung == "ddp"}  # DDP keeps them in its buckets
    share = s.batch_size // devices
    copies = [memory.estimate(s.model, [], share, s.image_size, optimizer=state, **facts)[0] for state in states]
    return [asdict(copy) | {"device": number} for number, copy in enumerate(copies)]


def main(out, rung, rounds=ROUNDS) -> int:
    """Measure in every process; rank 0 writes the result."""
    if rung not in RUNGS:
        raise UserError(f"no rung {rung!r}; allowed: {', '.join(RUNGS)}{did_you_mean(rung, RUNGS)}")
    with join_world() as world:
        result = measure(world, rung, int(rounds))
    RunLog(out, world.rank == 0).finish(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Record a step of each strategy for the player, on a machine with nothing else to do. `make notebooks` starts this.

    python tests/notebooks.py recordings

Two processes do a few steps of the course model under PyTorch's profiler; rank 0 writes ``NAME.json`` for each strategy
of `STRATEGIES` into the folder. A step in which a rank had to wait for its core, because other processes were on it, is
recorded again, and at last refused.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import mpdemo
from mpdemo.errors import UserError
from mpdemo.labs.pipeline import variant
from mpdemo.measure.compare import model_and_batch
from mpdemo.measure.traces import typical
from mpdemo.measure.trial import RECORDED, Trial, record
from mpdemo.predict.counting import SETTLED
from mpdemo.settings import Settings
from mpdemo.world.collectives import rest
from mpdemo.world.devices import ON_THE_CPU, processor
from mpdemo.world.env import join_world
from mpdemo.world.processes import end

MOST = 0.05  # of a step, for which a rank may have waited for its core
TRIES, ROUNDS = 3, 9
# a recording that no text explains; in it this rank computes each forward pass twice
PUZZLE, SLOWED = "puzzle", 0
STRATEGIES = {  # file, and strategy of the player -> name, what it is, settings
    "ddp": ("DDP", "DistributedDataParallel", Settings(rung="ddp")),
    "fsdp": ("FSDP", "fully_shard of each block", Settings(rung="fsdp")),
    "tp": ("Tensor parallel", "ColwiseParallel and RowwiseParallel in each block", Settings(rung="tensor")),
    "gpipe": ("GPipe", "ScheduleGPipe, 4 microbatches", variant("GPipe")),
    "1f1b": ("1F1B", "Schedule1F1B, 4 microbatches", variant("1F1B")),
    "interleaved": (
        "Interleaved 1F1B",
        "two stages on each rank, 4 microbatches",
        variant("Interleaved1F1B"),
    ),
    "zb": ("Zero bubble", "ScheduleZBVZeroBubble, 4 microbatches", variant("ZBVZeroBubble")),
    PUZZLE: ("A run", "fully_shard of each block", Settings(rung="fsdp")),
}


def recorded(world, name, given) -> dict:
    """Return what the player shows of a strategy; all ranks must call this."""
    tab, what, settings = STRATEGIES[name]
    trial = Trial(settings, world, *given)
    if name == PUZZLE and world.rank == SLOWED:
        for block in trial.rung.model.blocks():
            block.register_forward_pre_hook(compute_twice)
    for _ in range(SETTLED):
        trial.step()
    plain = statistics.median(seconds(trial) for _ in range(ROUNDS))
    for _ in range(TRIES):
        step = typical(record(trial))
        share = step["delay"] / step["end"]
        if share <= MOST:
            break
    else:
        busy = f"other processes had a rank's core for {share:.0%} of a step of {name}"
        raise UserError(
            f"{busy}; at most {MOST:.0%} are allowed: record when nothing else runs on this machine"
        )
    about = {
        "source": "recorded", "strategy": "fsdp" if name == PUZZLE else name, "tab": tab, "hang": None,
        "title": f"Recorded: {what}, {world.world_size} CPU processes, gloo",
        "machine": f"{processor()}, one core per process", "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__, "version": mpdemo.__version__, "plain": round(plain, 6),
        "delay": round(step.pop("delay"), 6),
    }  # fmt: skip
    note = f"The course's transformer, batch {settings.batch_size}, fp32: the step of median length of {RECORDED - 2} "
    note += f"under the profiler. Without it, the median step takes {1e3 * plain:.0f} ms. {about['machine']}; PyTorch "
    return (
        about | {"note": f"{note}{torch.__version__}, mpdemo {mpdemo.__version__}, {about['date']}."} | step
    )


def seconds(trial) -> float:
    """Return the seconds of a step without the profiler."""
    rest()
    begin = time.perf_counter()
    trial.step()
    rest()
    return time.perf_counter() - begin


@torch.no_grad()
def compute_twice(block, inputs):
    """Compute a block once more and forget the result, as a slow device takes longer."""
    block.forward(*inputs)


def main(folder):
    """Record all strategies; what is refused leaves the files of before."""
    with join_world() as world:
        try:
            given = model_and_batch(Settings(rung="single"))
            found = {name: recorded(world, name, given) for name in STRATEGIES}
        except UserError as error:
            print(f"mpdemo: error: {error}", file=sys.stderr)
            end(2)
    for name, step in found.items() if world.rank == 0 else ():
        text = json.dumps(step, separators=(",", ":")) + "\n"
        Path(folder, f"{name}.json").write_text(text)
        print(
            f"{name}: {1e3 * step['end']:.1f} ms, {len(step['events'])} events, {len(text) / 1e3:.0f} kB",
            flush=True,
        )


if __name__ == "__main__":
    os.environ |= ON_THE_CPU
    end(main(*sys.argv[1:]))

"""Run as the processes of a world: record the pipeline rung with every schedule.

timelines.py FOLDER MICROBATCHES STEPS
"""

import json
import sys
from pathlib import Path

from mpdemo.measure.traces import typical
from mpdemo.measure.trial import Trial, record
from mpdemo.predict import SCHEDULES
from mpdemo.settings import Settings
from mpdemo.training.recorder import clock_offset
from mpdemo.world.env import join_world


def main(folder, microbatches, steps):
    """Also compare the clocks of two processes as those of two machines are."""
    words = {
        "rung": "pipeline",
        "model": "transformer",
        "image_size": 28,
        "batch_size": 8,
        "timeline": True,
    }
    with join_world() as world:
        for schedule in SCHEDULES:
            trial = Trial(Settings(**words, schedule=schedule, microbatches=int(microbatches)), world)
            for _ in range(int(steps)):
                trial.step()
            trial.gradients()  # not a step: not recorded
            trial.run.recorder.save(Path(folder, schedule))
            if schedule == "1F1B":
                Path(folder, "profiled.json").write_text(json.dumps(typical(record(trial))))
        Path(folder, f"offset{world.rank}").write_text(repr(clock_offset(machine=f"machine {world.rank}")))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Predict and do the steps of a few trainings, once (one world of two processes); rank 0 writes the rows."""

import json
import sys
from pathlib import Path

from mpdemo.labs.step_times import measure
from mpdemo.trial import join_world

CASES = [
    {"rung": "single"},
    {"rung": "ddp", "accumulate": 2, "activation_checkpointing": True},
    {"rung": "pipeline", "schedule": "zbv"},
    {"rung": "tensor", "activation_checkpointing": True},
    {"rung": "tensor", "sequence_parallel": True},
]

with join_world() as world:
    rows = measure(world, 1, CASES, repeats=1)
if world.rank == 0:
    Path(sys.argv[1], "summary.json").write_text(json.dumps(rows))

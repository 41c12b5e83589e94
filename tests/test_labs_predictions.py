"""What the plan says of a training is what its processes hold and send, with grids of two by two.

Two processes, with every rung, are what notebooks/11_which_one.ipynb runs and asserts.
"""

import json

import pytest
from worlds import run_worlds

from mpdemo.labs.predictions import CASES

CLOSE = 0.05  # of the memory; the messages are equal to the last byte
BATCH = 16
PROCESSES = 4


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """A row for each case."""
    folder = tmp_path_factory.mktemp("predictions")
    run_worlds(folder, [[PROCESSES, "mpdemo/labs/predictions.py", str(folder), str(BATCH)]])
    return json.loads((folder / "summary.json").read_text())["rows"]


@pytest.mark.parametrize("number", range(len(CASES[PROCESSES])))
def test_memory_is_met_within_five_percent_and_messages_to_the_byte(rows, number):
    row = rows[number]
    assert len(row["counted"]) == len(row["predicted"]) == PROCESSES, row["case"]
    for predicted, counted in zip(row["predicted"], row["counted"], strict=True):
        assert predicted == pytest.approx(counted, rel=CLOSE), row["case"]
    assert row["messages"] == row["predicted_messages"], row["case"]


def test_every_rung_of_several_processes_is_compared():
    named = {case["rung"] for cases in CASES.values() for case in cases}
    assert named == {"ddp", "fsdp", "tensor", "model_parallel", "pipeline", "hybrid"}

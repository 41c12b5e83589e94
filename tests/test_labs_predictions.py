"""What the plan says of a training is what its processes hold and send: with every rung, and with grids of two."""

import json

import pytest
from worlds import run_worlds

from mpdemo.labs.predictions import CASES

CLOSE = 0.05  # of the memory; the messages are equal to the last byte
BATCH = 16
NUMBERS = [(n, number) for n, cases in CASES.items() for number in range(len(cases))]


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """The rows of both worlds, by the number of processes."""
    folder = tmp_path_factory.mktemp("predictions")
    run_worlds(folder, [[n, "mpdemo/labs/predictions.py", str(folder / str(n)), str(BATCH)] for n in CASES])
    return {n: json.loads((folder / str(n) / "summary.json").read_text())["rows"] for n in CASES}


@pytest.mark.parametrize(("processes", "number"), NUMBERS)
def test_memory_is_met_within_five_percent_and_messages_to_the_byte(rows, processes, number):
    row = rows[processes][number]
    assert len(row["counted"]) == len(row["predicted"]) == processes, row["case"]
    for predicted, counted in zip(row["predicted"], row["counted"], strict=True):
        assert predicted == pytest.approx(counted, rel=CLOSE), row["case"]
    assert row["messages"] == row["predicted_messages"], row["case"]


def test_every_rung_of_several_processes_is_compared(rows):
    named = {words.split()[1] for cases in rows.values() for words in (row["case"] for row in cases)}
    assert named == {"ddp", "fsdp", "tensor", "model_parallel", "pipeline", "hybrid"}

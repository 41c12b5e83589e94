"""What a dry run says of a training run is what its processes hold and send: every rung, and grids of two by two."""

import json

import pytest
from worlds import run_worlds

from mpdemo.labs.predictions import CASES

CLOSE = 0.05  # of the memory; the messages are equal to the last byte
BATCH = 32


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Processes -> a row for each case."""
    folders = {count: tmp_path_factory.mktemp(f"predictions-{count}") for count in CASES}
    worlds = [[n, "notebooks/labs/predictions.py", str(folder), str(BATCH)] for n, folder in folders.items()]
    run_worlds(tmp_path_factory.mktemp("worlds"), worlds)
    return {n: json.loads((folder / "summary.json").read_text())["rows"] for n, folder in folders.items()}


@pytest.mark.parametrize(("processes", "number"), [(n, i) for n, cases in CASES.items() for i in range(len(cases))])
def test_memory_is_met_within_five_percent_and_messages_to_the_byte(rows, processes, number):
    row = rows[processes][number]
    assert len(row["counted"]) == len(row["predicted"]) == processes, row["case"]
    for predicted, counted in zip(row["predicted"], row["counted"], strict=True):
        assert predicted == pytest.approx(counted, rel=CLOSE), row["case"]
    assert row["messages"] == row["predicted_messages"], row["case"]


def test_every_rung_of_several_processes_is_compared():
    named = {case["rung"] for cases in CASES.values() for case in cases}
    assert named == {"ddp", "fsdp", "tensor", "model_parallel", "pipeline", "hybrid"}

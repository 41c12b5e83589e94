"""What a dry run says of a training run is what its processes hold and send: every rung, and grids of two by two."""

import json

import pytest
from worlds import run_worlds

from mpdemo.labs.predictions import CASES

CLOSE = 0.05  # of the memory; the messages are equal to the last byte
BATCH = 32
BY_DAY = ("ddp", "fsdp", "tensor", "pipeline")  # a model that is cut without a pipeline is the last one's simpler case
ONE_OF_EACH = {2: [next(i for i, case in enumerate(CASES[2]) if case["rung"] == rung) for rung in BY_DAY]}
ALL = {processes: range(len(cases)) for processes, cases in CASES.items()}


@pytest.mark.parametrize(
    "chosen", [pytest.param(ONE_OF_EACH, id="one"), pytest.param(ALL, id="all", marks=pytest.mark.nightly)]
)
def test_memory_is_met_within_five_percent_and_messages_to_the_byte(chosen, tmp_path):
    folders = {processes: tmp_path / str(processes) for processes in chosen}
    lab = ("notebooks/labs/predictions.py",)
    run_worlds(tmp_path, [[n, *lab, str(folders[n]), str(BATCH), *map(str, numbers)] for n, numbers in chosen.items()])
    for processes, folder in folders.items():
        rows = json.loads((folder / "summary.json").read_text())["rows"]
        assert len(rows) == len(chosen[processes])
        for row in rows:
            assert row["predicted"] == [pytest.approx(counted, rel=CLOSE) for counted in row["counted"]], row["case"]
            assert row["messages"] == row["predicted_messages"], row["case"]


def test_every_rung_of_several_processes_is_compared():
    assert {case["rung"] for cases in CASES.values() for case in cases} == {*BY_DAY, "model_parallel", "hybrid"}

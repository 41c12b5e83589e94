"""This run, the course's record and the reader's own in one table; a damaged record is one line."""

import json
import re

import pytest

from mpdemo import paths
from mpdemo.notebook.records import beside

ROW = {"rung": "ddp", "devices": 2, "device_type": "cpu", "single_seconds": 0.319, "step_seconds": 0.226}
for name, interval in (("speedup", "speedup"), ("bound", "bound"), ("fraction_of_bound", "fraction")):
    ROW |= {name: 1.55, f"{interval}_interval": [1.43, 1.61]}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project, and a function that writes a record of one part into it."""
    monkeypatch.setattr(paths, "root", lambda: tmp_path)

    def write(file, device, part):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"device": device, "date": "2026-12-01 10:00:00", "parts": [{"outcome": "passed"} | part]}
        path.write_text(json.dumps(record))

    return write


def cells(shown) -> list:
    """The lines of the table as text, without the spaces that align them."""
    return [" ".join(line.split()) for line in repr(shown).splitlines()]


def test_a_strategy_stands_beside_the_readers_own_gpus(project):
    found = "2 CPU cores 319 → 226" + 3 * " 1.55 (1.43 to 1.61)"
    assert cells(beside("ddp", ROW))[1:] == [f"this run {found}"]
    fast = ROW | {"device_type": "cuda", "single_seconds": 0.02, "step_seconds": 0.011, "speedup": 1.9}
    project(
        "runs/gpu/2026-12-01-100000/record.json", "NVIDIA <L40S>", {"part": "two_ddp", "rows": [{}, fast]}
    )
    shown = beside("ddp", ROW)
    _, here, own, *why = cells(shown)
    assert here == f"this run {found}"
    assert own.startswith("yours: NVIDIA <L40S>, 2026-12-01 2 GPUs 20 → 11 1.90 (1.43 to 1.61)")
    assert " ".join(why).endswith("compare a speed-up with the upper bound in its line.")
    assert "&lt;L40S&gt;" in shown.data["text/html"] and "<L40S>" not in shown.data["text/html"]


def test_the_newest_record_that_has_passed_the_part_is_shown(project):
    def part(speed, **more):
        return {"part": "two_ddp", "rows": [ROW | {"device_type": "cuda", "speedup": speed}]} | more

    project("notebooks/gpu/2026-11-01-h100.json", "NVIDIA H100", part(1.7))
    project("notebooks/gpu/2026-11-02-h100.json", "NVIDIA H100", part(1.8))
    project("notebooks/gpu/2026-11-03-h100.json", "NVIDIA H100", part(1.9, outcome="failed"))
    _, _, h100, *_ = cells(beside("ddp", ROW))
    assert h100.startswith("NVIDIA H100, 2026-12-01, the course's record 2 GPUs 319 → 226 1.80 ")


@pytest.mark.parametrize("text", [
    "", "{", "[1]", "null", '{"parts": 3}', '{"parts": [7]}', '{"parts": [{"part": "two_ddp", "outcome": "passed"}]}',
    '{"device": "x", "date": 3, "parts": [{"part": "two_ddp", "outcome": "passed", "rows": []}]}',
    '{"device": "x", "date": "2026", "parts": [{"part": "two_ddp", "outcome": "passed", "rows": [{"options": []}]}]}',
    '{"device": "x", "date": "2026", "parts": [{"part": "two_ddp", "outcome": "passed", "rows": [5]}]}',
])  # fmt: skip
def test_a_damaged_record_is_one_line_and_an_older_one_takes_its_place(project, tmp_path, text):
    project("runs/gpu/1/record.json", "NVIDIA L4", {"part": "two_ddp", "rows": [ROW]})
    (tmp_path / "runs/gpu/2").mkdir()
    (tmp_path / "runs/gpu/2/record.json").write_text(text)
    lines = cells(beside("ddp", ROW))
    assert lines[2].startswith("yours: NVIDIA L4, 2026-12-01 2 CPU cores 319 → 226")
    assert re.search(
        r"runs/gpu/2/record.json is no record \(.+\); do: make gpu-record$", " ".join(lines[3:])
    ), lines

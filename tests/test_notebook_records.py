"""This run, the course's record and the reader's own in one table; a damaged record is one line."""

import json
import re

import pytest

from mpdemo import paths
from mpdemo.notebook.records import KINDS, beside

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
    assert cells(beside("two_ddp", [ROW]))[1:] == [f"this run {found}"]
    fast = ROW | {"device_type": "cuda", "single_seconds": 0.02, "step_seconds": 0.011, "speedup": 1.9}
    project(
        "runs/gpu/2026-12-01-100000/record.json", "NVIDIA <L40S>", {"part": "two_ddp", "rows": [{}, fast]}
    )
    shown = beside("two_ddp", [ROW])
    _, here, own, *why = cells(shown)
    assert here == f"this run {found}"
    assert own.startswith("yours: NVIDIA <L40S>, 2026-12-01 2 GPUs 20 → 11 1.90 (1.43 to 1.61)")
    assert " ".join(why).endswith("compare a speed-up with the upper bound in its line.")
    assert "&lt;L40S&gt;" in shown.data["text/html"] and "<L40S>" not in shown.data["text/html"]


def test_the_newest_record_that_has_passed_the_part_is_shown(project):
    def part(speed, **more):
        return {"part": "train_single", "output": [f"{speed} images/s, MFU 0.1 %, peak 66 MiB"]} | more

    project("notebooks/gpu/2026-11-01-h100.json", "NVIDIA H100", part("10,000"))
    project("notebooks/gpu/2026-11-02-h100.json", "NVIDIA H100", part("20,000"))
    project("notebooks/gpu/2026-11-03-h100.json", "NVIDIA H100", part("30,000", outcome="failed"))
    _, here, h100, *_ = cells(beside("train_single", "1,000 images/s, MFU 2.0 %, peak 9 MiB\nthe end"))
    assert here == "this run 1,000 2.0 % 9"
    assert h100 == "NVIDIA H100, 2026-12-01, the course's record 20,000 0.1 % 66"


@pytest.mark.parametrize("text", [
    "", "{", "[1]", "null", '{"parts": 3}', '{"parts": [7]}', '{"parts": [{"part": "gpt", "outcome": "passed"}]}',
    '{"device": "x", "date": 3, "parts": [{"part": "gpt", "outcome": "passed", "rows": []}]}',
    '{"device": "x", "date": "2026", "parts": [{"part": "gpt", "outcome": "passed", "rows": [{"options": []}]}]}',
    '{"device": "x", "date": "2026", "parts": [{"part": "gpt", "outcome": "passed", "rows": [5]}]}',
])  # fmt: skip
def test_a_damaged_record_is_one_line_and_an_older_one_takes_its_place(project, tmp_path, text):
    row = {
        "model": "gpt",
        "batch": 1,
        "options": [],
        "median_seconds": 1.0,
        "mfu": 0.3,
        "peak_from": "data sheet",
    }
    project("runs/gpu/1/record.json", "NVIDIA L4", {"part": "gpt", "rows": [row]})
    (tmp_path / "runs/gpu/2").mkdir()
    (tmp_path / "runs/gpu/2/record.json").write_text(text)
    lines = cells(beside("gpt", [row]))
    assert lines[2].startswith("yours: NVIDIA L4, 2026-12-01 gpt, batch 1 1000 30%")
    assert re.search(
        r"runs/gpu/2/record.json is no record \(.+\); do: make gpu-record$", " ".join(lines[3:])
    ), lines


def test_the_committed_records_have_what_is_read_from_them():
    assert all(" H100 " in repr(beside(what)) for what in KINDS)

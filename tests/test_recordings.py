"""The player's recordings: made on an idle machine, and what each file holds."""

import json
from types import SimpleNamespace

import pytest
import recordings as lab

from mpdemo.errors import UserError
from mpdemo.measure.timeline import waiting
from mpdemo.paths import root

FILES = sorted((root() / "mpdemo/notebook/player/recordings").glob("*.json"))


def test_a_recording_under_load_is_tried_again_and_refused(monkeypatch):
    step = {"ranks": 2, "end": 1.0, "events": [], "memory": None}
    monkeypatch.setattr(lab, "Trial", lambda *given: SimpleNamespace(step=lambda: None))
    world, tries = SimpleNamespace(rank=0, world_size=2), iter([0.2, 0.2, 0.04, 0.2, 0.2, 0.2])
    monkeypatch.setattr(lab, "record", lambda trial: [step | {"delay": next(tries)}])
    found = lab.recorded(world, "1f1b", ())
    assert (found["strategy"], found["delay"]) == ("1f1b", 0.04)
    with pytest.raises(
        UserError, match="other processes had a rank's core for 20% of a step of 1f1b; at most 5%"
    ):
        lab.recorded(world, "1f1b", ())
    monkeypatch.setattr(lab, "record", lambda trial: [step | {"delay": float("nan")}])
    with pytest.raises(UserError, match="nan"):
        lab.recorded(world, "1f1b", ())


def test_there_is_a_recording_of_each_strategy():
    assert sorted(file.stem for file in FILES) == sorted(lab.STRATEGIES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recording_is_small_says_where_it_was_made_and_explains_nearly_all_of_its_step(file):
    step = json.loads(file.read_text())
    assert file.stat().st_size < 60_000
    assert (
        step["machine"] in step["note"] and step["date"] in step["note"] and step["version"] in step["note"]
    )
    assert step["delay"] <= lab.MOST * step["end"]
    rows = step["events"] + waiting(step["events"])
    for rank in range(step["ranks"]):
        own = sorted((r["start"], r["end"]) for r in rows if r["rank"] == rank and r.get("lane") != "comm")
        assert all(before[1] <= after[0] + 2e-6 for before, after in zip(own, own[1:], strict=False))
        assert sum(end - start for start, end in own) > 0.75 * step["end"]
        assert min(map(min, step["memory"][rank])) >= 0 and len(step["memory"][rank]) > 50
    kinds = {row["kind"] for row in step["events"]}
    wanted = {"ddp": "A", "tp": "A", "fsdp": "GR", lab.PUZZLE: "GR"}.get(file.stem, "S")
    assert kinds >= {"F", "O", *wanted} and all(
        "bytes" in row for row in step["events"] if row["lane"] == "comm"
    )

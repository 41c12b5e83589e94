"""The parts of a step: what the lab reads from a recorded step, and their picture."""

import pytest

from mpdemo.labs.where_time_goes import parts
from mpdemo.notebook.plots.charts import PARTS, step_parts


def event(rank, kind, start, end, **more):
    """Return an event of a recorded step; times in ms."""
    row = {"rank": rank, "lane": "comm" if more else "compute", "kind": kind, "start": start / 1e3, "end": end / 1e3}
    return row | {name: value / 1e3 if name == "moves" else value for name, value in more.items()}


def test_every_moment_of_a_step_belongs_to_one_part():
    """Of two buckets, the first is reduced during the backward pass, and both at the same time for a while."""
    computed = ("L", 0, 10), ("F", 12, 30), ("B", 30, 60), ("O", 80, 95)
    events = [event(rank, *row) for rank in (0, 1) for row in computed]
    events += [event(rank, "A", 50, 72, moves=50, group="g0") for rank in (0, 1)]
    events += [event(rank, "A", start, 80, moves=70, group="g1") for rank, start in ((0, 60), (1, 70))]
    events.append(event(0, "O", 95, 99))
    found = [
        {name: round(1e3 * s) for name, s in parts({"events": events, "end": 0.1}, rank).items()} for rank in (0, 1)
    ]
    assert [row.pop("hidden") for row in found] == [10, 10]
    common = {"loading": 10, "forward": 18, "backward": 30, "exposed": 20}
    assert found[0] == common | {"optimizer": 19, "waits": 0, "other": 3}
    assert found[1] == common | {"optimizer": 15, "waits": 4, "other": 3}  # rank 0 is through later
    late = [row | {"moves": 0.078} if row.get("group") == "g1" else row for row in events if row.get("group") != "g0"]
    assert parts({"events": late, "end": 0.1}, 0)["waits"] == pytest.approx(0.018)


def row(rank, case="a case", **seconds):
    return dict.fromkeys([*PARTS, "hidden"], 0.0) | {"case": case, "rank": rank} | seconds


def test_the_picture_has_a_bar_for_each_part_of_each_rank():
    rows = [row(rank, case, forward=0.1, exposed=0.05, hidden=0.02) for case in ("x", "y") for rank in (0, 1)]
    picture = step_parts(rows)
    assert repr(picture) == "the parts of a step of each of 2 ranks: x, y"
    labels = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert labels[-1] == "y, rank 1 (20 ms hidden)" and len(labels) == len(rows)
    assert len(picture.figure.axes[0].patches) == len(rows) * len(PARTS)

"""The parts of a step are read from the profiler's ranges."""

import torch
from torch.profiler import record_function

from mpdemo.labs import profile_parts
from mpdemo.notebook.plots.charts import PARTS, step_parts

MS = 1000  # microseconds
EVENTS = [  # name, thread, begin, end; thread 1 trains, and others are those of gloo
    (profile_parts.STEP, 1, 0, 100 * MS),
    (profile_parts.LOADING, 1, 0, 10 * MS),
    ("aten::stack", 1, 2 * MS, 8 * MS),  # part of the loading
    ("aten::linear", 1, 12 * MS, 30 * MS),
    ("aten::addmm", 1, 13 * MS, 29 * MS),  # within the one before
    ("aten::mul", 7, 40 * MS, 60 * MS),  # of another thread
    ("autograd::engine::evaluate_function: AddmmBackward0", 1, 30 * MS, 60 * MS),
    ("aten::mm", 1, 31 * MS, 59 * MS),
    ("gloo:all_reduce", 2, 50 * MS, 75 * MS),
    ("gloo:all_reduce", 3, 70 * MS, 80 * MS),  # at the same time as the end of the other
    ("Optimizer.step#SGD.step", 1, 80 * MS, 95 * MS),
    ("gloo:all_reduce", 2, 300 * MS, 400 * MS),  # of another step
]


def test_every_moment_of_a_step_belongs_to_one_part():
    parts = {name: round(1000 * s) for name, s in profile_parts.parts(EVENTS, 1, (0, 100 * MS)).items()}
    assert parts.pop("hidden") == 10
    assert parts == {"loading": 10, "forward": 18, "backward": 30, "optimizer": 15, "exposed": 20, "other": 7}
    assert sum(parts.values()) == 100


def test_the_profiler_still_has_the_names_that_are_looked_for():
    """Loading, forward, backward and optimizer of a real step, on one process."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile_parts.recording() as recorded:
        for _ in range(2):
            with record_function(profile_parts.STEP):
                with record_function(profile_parts.LOADING):
                    images = torch.randn(200, 300)
                model(images).sum().backward()
                optimizer.step()
    steps = profile_parts.steps_of(recorded)
    assert len(steps) == 2
    for step in steps:
        assert all(step[part] > 0 for part in ("loading", "forward", "backward", "optimizer"))
        assert step["exposed"] == step["hidden"] == 0


def test_ranks_that_wait_for_each_other_have_equally_long_mean_steps():
    """Rank 1 is late in one step and early in the next; its median step would be shorter than rank 0's."""
    ranks = [[{"forward": ms} for ms in times] for times in ((100, 100, 100), (85, 90, 125))]
    assert [profile_parts.mean_step(steps) for steps in ranks] == [{"forward": 100}] * 2


def row(rank, case="a case", **seconds):
    return dict.fromkeys([*PARTS, "hidden"], 0.0) | {"case": case, "rank": rank} | seconds


def test_the_picture_has_a_bar_for_each_part_of_each_rank():
    rows = [row(rank, case, forward=0.1, exposed=0.05, hidden=0.02) for case in ("x", "y") for rank in (0, 1)]
    picture = step_parts(rows)
    assert repr(picture) == "the parts of a step of each of 2 ranks: x, y"
    labels = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert labels[-1] == "y, rank 1 (20 ms hidden)" and len(labels) == len(rows)
    assert len(picture.figure.axes[0].patches) == len(rows) * len(PARTS)

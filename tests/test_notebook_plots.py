"""Figures: readable pictures, lines of text that a test can compare, and only numbers from the rows."""

import math

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from mpdemo.errors import UserError
from mpdemo.labs import job_pictures, layer_pictures, scaling_pictures
from mpdemo.notebook import plots
from mpdemo.notebook.plots.style import paler
from mpdemo.notebook.plots.timeline import OPERATIONS
from mpdemo.predict import simulate

ROWS = [{"event": "step", "step": step, "loss": 2.3 * math.exp(-step / 20)} for step in range(1, 41)]
ROWS.append({"event": "epoch", "epoch": 0, "train_loss": 1.0, "validation_accuracy": 0.9})


def shown():
    yield plots.curves({"single": ROWS, "ddp": ROWS})
    yield scaling_pictures.efficiency({1: 1.0, 4: 0.9}, {1: 1.0, 4: 0.95}, held_out=(4,))
    yield scaling_pictures.messages([0.1, 1.0], [0.2, 1.1], 0.1, 1.0)
    yield plots.bars(
        {"compute": {"forward": 0.1, "backward": 0.2}, "loader": {"forward": 0.05}},
        "time of a step (s)",
        limit=0.25,
    )
    yield layer_pictures.held(
        {"one device": [{"MLP": 2**21}] * 2, "1F1B": [{"MLP": 2**20}, {"MLP": 2**19}]}
    )
    jobs = [
        {"steps": [0, 7], "losses": [(5, 4.7)], "why": "node lost"},
        {"steps": [5, 10], "losses": [(10, 3.8)]},
    ]
    yield job_pictures.one_run([(5, 4.7), (10, 3.8)], jobs)
    yield job_pictures.time_line({"rank": [("step", 0, 1), ("waits", 1, 3)]}, {"USR1": 1, "KILL": 3})
    yield scaling_pictures.arrivals(
        {"healthy": [[0.0, 1.0], [2.0, 1.5]], "slow": [[0.0, 9.0], [0.0, 8.0]]}, 2.0
    )
    numbers = [[3, 10], [-1, 0.25]]
    yield plots.matrices(
        ("x", numbers, "columns"), "→ relu →", ("y", [[3, 10]], 1), "and", ("z", [7], None)
    )
    yield plots.matrices(("samples", range(8), [0, 1, 2, 3] * 2), ranks=4)
    yield plots.messages(("before", [3, 1, 2]), [(0, 1), (2, 1)], ("after", [6, 6, 6]))
    yield plots.ring([[3, 2, 3], [10, 3, 30], [1, 1, 3]], [0, 1, 2], done=[3, 3, 3])
    yield plots.grid([[0, 4], [1, 5], [2, 6], [3, 7]], ("data parallel", "tensor parallel"), per_node=4)


def texts(axes):
    """Return everything written on the axes."""
    legend = axes.get_legend()
    labels = [axes.xaxis.label, axes.yaxis.label, axes.title]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())  # labels beyond it are not drawn
        # one that shares its labels has none
        placed = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
        labels += [label for place, label in placed if low <= place <= high]
    beside = [text for legend in axes.figure.legends for text in legend.get_texts()]
    written = [
        *beside,
        *axes.texts,
        *(labels if axes.axison else []),
        *(legend.get_texts() if legend else []),
    ]
    return [text for text in written if text.get_text().strip()]


@pytest.mark.parametrize("bundle", list(shown()), ids=repr)
def test_every_text_is_inside_the_figure_and_on_no_other_text(bundle):
    figure = bundle.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure.axes[0])]
    assert boxes
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0, f"{text!r} leaves the figure"
        assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, f"{text!r} leaves the figure"
    for index, (text, box) in enumerate(boxes):
        for other, rest in boxes[index + 1 :]:
            assert not box.padded(-1).overlaps(rest), f"{text!r} lies on {other!r}"


def looks_of(axes):
    return [(to_hex(box.get_facecolor()), box.get_hatch()) for box in axes.patches]


def test_a_matrix_says_who_has_each_number_in_colours_hatches_and_words():
    """What it says of other tensors is compared with the notebooks' saved outputs."""
    tensor = torch.tensor([[1.0, 2.0], [3.0, 1.0]], requires_grad=True)
    shown = plots.matrices(("x", tensor), "@", ("up", [[1, -1], [1, 2]], "columns"), who="device")
    said = "x [[1, 2], [3, 1]] (both devices) @ up [[1, -1], [1, 2]] (of devices [[0, 1], [0, 1]])"
    assert repr(shown) == shown.metadata["image/png"]["alt"] == said
    looks = looks_of(shown.figure.axes[0])
    assert len(set(looks[:4])) == 1 and looks[4] == looks[6] != looks[5] == looks[7]
    assert len({hatch for _, hatch in looks}) == 2
    legend = [text.get_text() for text in shown.figure.legends[0].texts]
    assert legend == ["device 0", "device 1", "both devices"]
    mixed = plots.matrices(("x @ x.T", [[25, 24], [24, 25]], [[0, None], [None, 1]]))
    assert repr(mixed).endswith("(of ranks [[0, both], [both, 1]])")


def test_messages_are_gray_where_all_ranks_have_the_same():
    axes = plots.messages(("has", [3, 1]), [(0, 1), (1, 0)], ("sum", torch.tensor([4, 4]))).figure.axes[0]
    looks = looks_of(axes)
    assert len(looks) == 4 and looks[2] == looks[3] and len(set(looks)) == 3
    assert sum(hasattr(text, "arrow_patch") for text in axes.texts) == 2


def test_a_timeline_has_a_colour_and_a_name_for_each_operation():
    simulation = simulate("ZBVZeroBubble", [1] * 4, [2] * 4, 4, 2)
    figure = plots.timelines({"simulated": simulation}).figure
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    drawn = [boxes for boxes in figure.axes[0].collections if boxes.get_paths()]
    painted = {to_hex(colour) for boxes in drawn for colour in boxes.get_facecolor()}
    for name, colour in (OPERATIONS[kind] for kind in "FIW"):
        assert name in legend
        for shade in (colour, paler(colour)):  # of a rank's first stage, and of its second one
            assert shade in painted


def test_curves_draw_the_rows_that_were_given():
    bundle = plots.curves({"single": ROWS, "ddp": [{"step": step, "loss": 2 / step} for step in (1, 2, 4)]})
    assert repr(bundle) == "loss against step: single (40 points), ddp (3 points)"
    assert bundle.metadata["image/png"]["alt"].endswith("; ddp from 2 (step 1) to 0.5 (step 4)")
    axes = bundle.figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per image)")
    first, second = axes.get_lines()
    assert list(first.get_xdata()) == list(range(1, 41)) and list(second.get_ydata()) == [2, 1, 0.5]
    assert first.get_color() != second.get_color() and first.get_linestyle() != second.get_linestyle()
    with pytest.raises(UserError, match="no rows with 'step' and 'loss' in ddp"):
        plots.curves({"single": ROWS, "ddp": []})


def test_bars_have_their_number_at_the_end_and_a_limit_is_seen_on_every_part(tmp_path):
    parts = dict.fromkeys("abcde", 0.4)
    bars = plots.bars({"fits": parts, "doesn't": 6.234}, "memory (GiB)", limit=4)
    axes = bars.figure.axes[0]
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [("2.00", 2), ("6.23", 6.234)]
    (limit,) = axes.lines
    assert to_hex(limit.get_color()) not in {colour for colour, _ in looks_of(axes)}
    assert repr(bars) == "memory (GiB): fits, doesn't"  # no measured number
    assert bars.metadata["image/png"]["alt"].endswith("e 0.40; doesn't: 6.23; limit: 4.00")
    bars.save(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes()[1:4] == b"PNG"


def test_a_timeline_without_operations_is_refused():
    for nothing in ({}, {"GPipe": []}):
        with pytest.raises(UserError, match="no operations to draw"):
            plots.timelines(nothing)

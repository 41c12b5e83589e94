"""The lint finds every trap, each in a notebook that is otherwise in order; the refresh leaves no trace."""

import copy
import re
from pathlib import Path

import documents
import nbformat
import screenshots
import sitting_rules
from notebook_rules import lint, misplanned, replanned, undescribed, unsourced
from PIL import Image

import notebooks

v4 = nbformat.v4
PNG = {"text/plain": "a picture", "image/png": "iVBORw0KGgo="}
ALT = {"image/png": {"alt": "loss from 3.1 to 0.2"}}


def code(source, outputs=(), **metadata):
    return v4.new_code_cell(source, outputs=list(outputs), metadata=metadata)


def stream(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


ERROR = v4.new_output("error", ename="KeyError", evalue="3", traceback=["KeyError: 3"])


def notebook(*cells):
    """A notebook in order, with some cells more at the end."""
    picture = v4.new_output("execute_result", data=PNG, metadata=ALT, execution_count=1)
    first = [
        v4.new_markdown_cell("# A title\n\nThe goal."),
        code("picture", [picture]),
        code("assert True"),
    ]
    return v4.new_notebook(cells=[*first, *cells])


def out(**data):
    return [
        v4.new_output("display_data", data={name.replace("_", "/", 1): text for name, text in data.items()})
    ]


TABLE = "<table style='width: 3px'><tr><td>it&#x27;s 930 ms</td><td>{}%</td></tr></table>"
WIDGET = v4.new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}})
GOOD = [
    code("x = 7 % 3 != 2"),
    code("t", out(text_html=TABLE.format(16), text_plain="it's 930 ms 16%")),
    code("p", out(text_html='<img alt="DDP: 60 ms" src="..."><img data-still alt="whole on both ranks">')),
    v4.new_markdown_cell("[the loop](../mpdemo/errors.py) and [a page](https://pytorch.org)"),
]
WHOLE = [  # a notebook, and what is wrong with it
    (v4.new_notebook(cells=notebook().cells[1:]), "does not begin with a title"),
    (v4.new_notebook(cells=notebook().cells[::2]), "has no picture in its first five"),
    (v4.new_notebook(cells=notebook().cells[:2]), "asserts nothing"),
]
CELLS = [  # a cell, and what is wrong with it
    (code("x = 1\n" * 46), "has 46 lines; at most 45"),
    (code("%%ranks\nx = " + 101 * "1"), "has a line of 105 characters; at most 104"),
    (
        code("show(f)", out(text_markdown=f"```python\n{105 * 'x'}\n```")),
        "has a line of 105 characters; at most 104",
    ),
    (code(" "), "is empty"),
    (code("f();"), "ends with ';'"),
    (code("if x:\n    !false"), "uses ! or %"),
    (code("x = !ls"), "uses ! or %"),
    (code("%nosuchmagic"), "uses ! or %"),
    (code("%%time\nx = 1"), "uses ! or %"),
    (code("clear_output()"), "nbval cannot compare it"),
    (code("mp.spawn(f, nprocs=2)"), "a child of the kernel outlives it"),
    (code("import matplotlib.pyplot as plt"), "figures come from mpdemo.notebook.plots"),
    (code("# NBVAL_SKIP\nx = 1"), "say it with a tag"),
    (code("x = '/home/me/data'"), "names a path or an address of one machine: '/home/m'"),
    (code("x = 1", tags=["nbval-ignore-outputs"]), "unknown tag 'nbval-ignore-outputs'"),
    (code("raise KeyError(3)", [ERROR]), "ended with an error"),
    (code("w", [WIDGET]), "saved a widget"),
    (code("f()", [stream("Warning: old", "stderr")]), "printed to stderr: 'Warning: old'"),
    (code("f()", [stream("at /root/x")]), "names a path or an address of one machine: '/root/'"),
    (code("f", [stream("<f at 0x7f32a1b0>")]), "names a path or an address of one machine: '0x7f32a1b0'"),
    (code("f", out(text_html="<script src='https://cdn'>")), "runs a script or loads from elsewhere"),
    (
        code("t", out(text_html=TABLE.format(113), text_plain="this run 930 ms 16%")),
        "shows other numbers as HTML than",
    ),
    (code("f", [stream("x" * 300_001)]), "more than 300 kB"),
    (code("p", out(**{name.replace("/", "_"): data for name, data in PNG.items()})), "tells no number: ''"),
    (code("p", out(text_html="<img src='data:image/png;...'>")), "tells no number: ''"),
    (
        code("p", out(text_html='<img width="7" alt="DDP waits" src="data:image/png;...">')),
        "no number: 'DDP waits'",
    ),
    (v4.new_markdown_cell("see /tmp/me"), "names a path or an address of one machine: '/tmp/'"),
    (v4.new_markdown_cell("[gone](99_gone.ipynb)"), "links to 99_gone.ipynb, which is not there"),
    (v4.new_markdown_cell("![logo](https://example.org/a.png)"), "loads a picture from elsewhere"),
]


def test_the_lint_finds_each_trap_and_leaves_a_notebook_in_order_alone():
    folder = notebooks.root() / "notebooks"
    assert lint(notebook(*GOOD), folder) == []
    for whole, said in [*WHOLE, *((notebook(cell), said) for cell, said in CELLS)]:
        problems = lint(whole, folder)
        assert len(problems) == 1 and said in problems[0], (said, problems)


SHOWN = code("wait(30)", [stream("95.6 ms, 1,234 MiB"), *out(text_html="<b style='width: 8'>0.25</b>")])
PROSE = [  # what stands in the prose, and which of its numbers nothing shows
    ("It takes 96\nms, at 0.2 or 0.3 times the speed, and 1,234 MiB. It waits 30 s.", []),
    ("It takes 95 ms.", ["95 ms"]),
    ("It takes 96.0-ms steps.", ["96.0 ms"]),
    ("Bucket 2 holds 28 of the 1,234 MiB.", ["28 MiB"]),
    ("From 1,235 to 30 MiB/s.", ["1,235 MiB"]),
    ("A pixel is 8 times as wide.", ["8 times"]),
    ("In `7 MiB` and\n```python\n7 * MiB\n```\nhalf of the 77 GB are 7 GB.", ["77 GB"]),
    ("8 % of 9 minutes, section 99.", []),
]


def test_a_number_that_nothing_shows_needs_a_source():
    for text, wanted in PROSE:
        whole = notebook(SHOWN, v4.new_markdown_cell(text))
        problems = list(unsourced(whole, {}))
        assert [
            re.search(r"^cell 4 \(.*\): says (.*), which no cell shows", said)[1] for said in problems
        ] == wanted
        assert list(unsourced(whole, dict.fromkeys(wanted, "a paper"))) == []
    (said,) = unsourced(notebook(SHOWN), {"7 MiB": "a paper"})
    assert "says 7 MiB nowhere any more" in said


def test_an_opening_plans_the_time_that_trainers_are_told():
    texts = {"Plan 60 minutes.": 58, "Plan\n60 minutes.": 61, "Plan about 88 minutes.": 88}
    wrong = {"Plan 60 minutes.": 57, "In ten minutes.": 60, "Plan 20 minutes. Plan 20 minutes.": 20}
    for text, minutes in texts.items():
        assert not list(misplanned(v4.new_notebook(cells=[v4.new_markdown_cell(text)]), minutes)), text
    for text, minutes in wrong.items():
        (said,) = misplanned(v4.new_notebook(cells=[v4.new_markdown_cell(text)]), minutes)
        assert f"says {minutes} min" in said
    assert replanned("Plan\n60 minutes, no more.", 73) == "Plan\n75 minutes, no more."


ABOUT = {
    "objectives": ["split a model", "run it"],
    "prerequisites": ["02"],
    "scripts": [],
    "minutes": 24,
    "seconds": 999,
}


def test_a_notebook_says_what_the_pages_need_of_it():
    wrong = [
        ({}, []),
        ({"objectives": ["run it"]}, ["1 objectives; 2 to 4"]),
        (
            {"objectives": ["Split it", "run it."]},
            ["'Split it' doesn't complete", "'run it.' doesn't complete"],
        ),
        ({"objectives": ["run it", " ".join(21 * ["it"])]}, ["in 20 words"]),
        ({"prerequisites": ["02", "03"]}, ["builds on 03, which comes later"]),
    ]
    for change, said in wrong:
        whole = v4.new_notebook(metadata={"mpdemo": ABOUT | change})
        found = list(undescribed(whole, "03"))
        assert len(found) == len(said) and all(map(str.__contains__, found, said)), found
    (said,) = undescribed(v4.new_notebook(), "03")
    assert said.startswith("its metadata lacks minutes, objectives, prerequisites, scripts, seconds")


def test_the_minutes_may_be_off_by_a_tenth():
    for told, problems in ((30, 0), (27, 0), (26, 1), (60, 1)):
        about = {"mpdemo": {"minutes": told}}
        whole = v4.new_notebook(cells=[v4.new_markdown_cell("word " * 3000)], metadata=about)
        assert len(list(documents.mistimed(whole))) == problems


def test_normal_form_is_stable_and_keeps_what_is_compared():
    messy = notebook(
        code("print(1)  ", [stream("a"), stream("b\n")], tags=["nbval-ignore-output"], collapsed=True)
    )
    messy.metadata = nbformat.from_dict({"mpdemo": {"minutes": 3}, "widgets": {}})
    before = notebooks.compared(messy)
    once = notebooks.text_of(notebooks.normalise(copy.deepcopy(messy)))
    saved = nbformat.reads(once, as_version=4)
    assert "collapsed" not in once and "widgets" not in once
    assert saved.metadata.mpdemo == {"minutes": 3} and notebooks.compared(saved) == before
    assert saved.cells[3].outputs == [stream("ab\n")] and saved.cells[3].execution_count == 3
    assert notebooks.text_of(notebooks.normalise(saved)) == once


def test_only_what_the_sanitizer_names_may_change():
    def printing(text):
        return notebooks.compared(notebook(code("f()", [stream(text)])))

    assert printing("3.1 s, 20 images/s") == printing("4.25 s, 1,200.5 images/s")
    assert printing("1.87 times the speed") == printing("1.9 times the speed")
    assert printing("loss 3.1") != printing("loss 3.2")
    assert printing("loss 0.242108") == printing("loss 0.242107") != printing("loss 0.243108")
    assert printing("97 % of the bound") == printing("93.5 % of the bound")
    on_this_machine = (
        "Slurm not found: ddp runs on this machine, 2 processes in place of 2 nodes (job 16)\n"
    )
    assert printing(on_this_machine) == printing(
        "submitted ddp to cluster box: job 7 (runs/ddp/job.sbatch)\n"
    )
    assert (
        printing("found job 16 (done)")
        == printing("found job 7 (done)")
        != printing("found job 7 (failed)")
    )
    assert printing("accuracy 97 %") != printing("accuracy 93 %")


def test_what_holds_only_on_an_idle_machine_is_left_out_of_tests():
    whole = notebook(code("if x:\n    assert a < b  # on an idle machine\nassert c == d"))
    assert notebooks.without_speed(whole).cells[-1].source == "if x:\n    pass\nassert c == d"
    for path in notebooks.notebooks():
        code_of = [
            cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
        ]
        marked = [
            line for source in code_of for line in source.splitlines() if "on an idle machine" in line
        ]
        assert all(notebooks.SPEED.match(line) for line in marked), path


def test_a_screenshot_shows_the_cells_as_they_are():
    for picture in screenshots.PICTURES:
        noted = Image.open(screenshots.path_of(picture)).text["cells"]
        assert noted == screenshots.digest(picture), (
            f"{picture}.png is stale: run python tests/screenshots.py"
        )


def test_a_refresh_executes_saves_and_then_leaves_no_trace(tmp_path, monkeypatch):
    whole = notebook(code("import time\nprint(f'{time.time():.3f} s')"), code("print(1 + 1)"))
    whole.cells[0].source, whole.metadata = (
        "# A title\n\nPlan 2 minutes.",
        {"mpdemo": ABOUT | {"path": "main", "ideas": [[whole.cells[0].id, "a title"]]}},
    )
    whole.cells[1].source = f"display(\n    {PNG},\n    metadata={ALT}, raw=True)"
    path = tmp_path / "course" / "99_try.ipynb"
    path.parent.mkdir()
    nbformat.write(whole, path)

    def copied(folder):
        (Path(folder) / "notebooks").mkdir()
        (Path(folder) / "mpdemo").symlink_to(notebooks.root() / "mpdemo")
        return Path(folder)

    monkeypatch.setattr(notebooks, "fresh_copy", copied)
    assert notebooks.refresh(path, tmp_path / "ladder") == "changed"
    saved = nbformat.read(path, as_version=4)
    assert saved.cells[4].outputs[0].text == "2\n" and saved.metadata.mpdemo.seconds < 90
    saved.metadata.mpdemo.minutes = sitting_rules.minutes(saved)  # with the seconds that the machine took
    path.write_text(notebooks.text_of(saved))
    assert notebooks.check(path) == []
    assert notebooks.refresh(path, tmp_path / "ladder") == "same"
    assert notebooks.refresh(path, tmp_path / "ladder", everything=True) == "changed"  # another time of day

"""The rules of sittings: each is broken once by a sitting that is otherwise in order."""

from pathlib import Path

import nbformat
import pytest
import sitting_rules

v4 = nbformat.v4
FILE = Path("notebooks/21_ddp_by_hand.ipynb")


def sitting(*more, opening="What we do.", **about):
    """A sitting in order, with some cells more at the end."""
    cells = [
        v4.new_markdown_cell(f"# 21. DDP by hand\n\n{opening}", id="title"),
        v4.new_markdown_cell("## 1. A mean\n\nNow `mean_of`.", id="mean"),
        v4.new_code_cell("def mean_of(x):\n    return x.mean()", id="mean-code"),
        *(v4.new_code_cell("x = 1", id=f"short-{number}") for number in range(2)),
    ]
    known = {"path": "main", "ideas": [["mean", "a mean of gradients"]], "seconds": 30}
    return v4.new_notebook(cells=[*cells, *more], metadata={"mpdemo": known | about})


def text(source, name="more"):
    return v4.new_markdown_cell(source, id=name)


def code(source, name="more-code"):
    return v4.new_code_cell(source, id=name)


MANY = [text("short", f"t{number}") for number in range(36)]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            sitting(
                opening="You need [20](20_processes.ipynb) and 12. Plan 20 minutes.", prerequisites=["20"]
            ),
            "its opening needs 12, and",
        ),
        (sitting(opening="If you know means, go on at section 4."), "without running the cells"),
        (sitting(path="both"), "path is 'both', not main or elective"),
        (sitting(ideas=[]), "has no ideas"),
        (sitting(ideas=[["gone", "x"]]), "cells that are not there: gone"),
        (sitting(ideas=[["mean", "x"], ["title", "y"]]), "not in the order of the text"),
        (sitting(ideas=[["mean", "x"], ["mean", "y"]]), "two of one cell"),
        (sitting(*MANY, ideas=[[cell.id, "x"] for cell in MANY[:8]]), "8 ideas between cells 1 and 41"),
        (sitting(text("word " * 81), text("The end.", "end")), "cell 5 (more): has 81 words; at most 80"),
        (sitting(text("word " * 101)), "cell 5 (more): has 101 words; at most 100"),
        (sitting(*(text("word " * 60, f"t{n}") for n in range(3))), "have 60 words in the middle"),
        (sitting(code("x = 1\n" * 13)), "cell 5 (more-code): has 13 lines; at most 12"),
        (sitting(code("%%task 21.1\n" + "x = 1\n" * 20)), "has 21 lines; at most 20"),
        (sitting(*(code("x = 1\n" * 12, f"c{n}") for n in range(4))), "12 lines in the middle; at most 6"),
        (sitting(*(text("word " * 49, f"t{n}") for n in range(54))), "has 2660 words; at most 2600"),
        (sitting(seconds=46 * 60), "46 minutes without its exercises; at most 45"),
        (
            sitting(*(text(f"**Your turn 21.{n}** (write a mechanism).", f"t{n}") for n in range(4))),
            "101 minutes with",
        ),
        (
            sitting(text("Call `step()`."), code("x = 1"), code("def step():\n    pass", "s")),
            "says step before cell 7",
        ),
        (
            sitting(text("With `--resume`."), code("x = 1"), code("run('a.py --resume')", "s")),
            "says --resume before",
        ),
    ],
)
def test_a_sitting_that_breaks_one_rule_is_told_it(broken, said):
    (found,) = sitting_rules.breaches(broken, FILE)
    assert said in found


def test_a_sitting_in_order_is_left_alone():
    import_only = code("from mpdemo.notebook.course import run\nx = 1", "first")
    whole = code("class Layer:\n" + "    x = 1\n" * 19, "class")
    linked = text("With [`step`](glossary.md#step).", "linked")
    late = code("def step():\n    run('a.py')", "late")
    cells = import_only, linked, whole, text("`run` starts a job."), late
    opening = "If you know means, run the first cell, and go on at section 4."
    assert not list(sitting_rules.breaches(sitting(*cells, opening=opening), FILE))


def test_the_name_of_a_sitting_fits_into_the_list_of_files():
    (found,) = sitting_rules.breaches(sitting(), Path("21_ddp_written_by_hand.ipynb"))
    assert "22 characters; at most 16" in found


def test_exercises_are_counted_apart():
    turn = text("**Your turn 21.1** (predict).\n\n" + "word " * 400)
    whole = sitting(text("word " * 100, "t"), turn, code('check("21.1", ...)'), seconds=60)
    assert (sitting_rules.minutes(whole), sitting_rules.minutes_of_exercises(whole)) == (2, 4)

"""Tables for single notebooks: the known failures (10), the decision of `mpdemo.plan.choose` (11), scalars (12)."""

import logging
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.jobs.explain import known_failures
from mpdemo.notebook.show import Bundle
from mpdemo.plan.case import LINKS
from mpdemo.plan.choose import choose, tree
from mpdemo.rules import SHARING_RUNGS

CHOICE = ("devices", "nodes", "use", "parts", "images at once", "MiB per device", "computing (ms)", "speed-up",
          "sends (ms)")  # fmt: skip
SHOWN = 3  # messages of a failure, which may have many


def failure_table(*kinds) -> Bundle:
    """Show the known failures that a notebook explains, of all or some of `mpdemo.jobs.explain.KINDS`."""
    rows = [known for known in known_failures() if known.notebook and (not kinds or known.kind in kinds)]
    lines = ["| you see | it is | do | notebook |", "|---|---|---|---|"]
    for known in rows:
        seen = "<br>".join(_cell(words, known.kind != "silent") for words in known.seen[:SHOWN])
        link = f"[{known.notebook[:2]}]({known.notebook}.ipynb)"
        lines.append(f"| {seen} | {_cell(known.what)} | {_cell(known.do)} | {link} |")
    return Bundle(f"{len(rows)} known failures", markdown="\n".join(lines))


def _cell(text, is_code=False) -> str:
    """A text for a table's cell, where a bar would end it and a hash or a dollar could mean something else."""
    text = text.replace("|", "\\|")
    return f"`{text}`" if is_code else text.replace("$", "\\$").replace("_", "\\_")


def show_tree() -> Bundle:
    """Display the decision tree that is drawn from the rules of `mpdemo.plan.choose`."""
    return Bundle(tree(), markdown=f"```mermaid\n{tree()}\n```")


def choice_table(case, devices=((1, 1), (2, 1), (8, 2), (16, 4))) -> Bundle:
    """Display what to use for a `mpdemo.plan.case.Case` on several numbers of devices and nodes.

    `computing` is what a step takes at least, `speed-up` compares it with one device that had room for all; `sends`
    is how long the busiest device's messages of a step take. "-": no data sheet says it.
    """
    rows = [_choice(replace(case, devices=number, nodes=nodes)) for number, nodes in devices]
    columns = {"disable_numparse": True, "colalign": ("right", "right", "left", *["right"] * 6)}
    return Bundle(tabulate(rows, CHOICE, "simple", **columns), markdown=tabulate(rows, CHOICE, "pipe", **columns))


def _choice(case):
    choice = choose(case)
    if not choice.rung:
        return case.devices, case.nodes, choice.answer, *["-"] * 6
    predicted, parts = choice.predicted, choice.settings.get("microbatches", 1)
    replicas = choice.settings.get("replicas", case.devices if choice.rung in SHARING_RUNGS else 1)
    images, seconds = case.batch // replicas // parts, predicted.seconds
    times = (f"{1000 * seconds:.1f}", f"{case.one_device_seconds / seconds:.1f}") if seconds else ("-", "-")
    memory, sends = f"{predicted.memory / 2**20:,.0f}", f"{1000 * predicted.sent / case.link:.2f}"
    return case.devices, case.nodes, choice.answer, parts, images, memory, *times, sends


def links() -> str:
    """Return the assumed speed of the links, as a sentence."""
    inside, between = (LINKS[one_node] / 1e9 for one_node in (True, False))
    return f"inside a node {inside:g} GB per second, between nodes {between:g} GB per second"


def scalars(folder) -> dict:
    """Return what TensorBoard reads in a folder such as ``runs/NAME/tensorboard``: tag -> list of (step, value).

    The values are in the order in which they were written, without those that TensorBoard hides.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UserError("the package tensorboard is not installed; pip install tensorboard") from None
    if not list(Path(folder).glob("events.out.tfevents.*")):
        raise UserError(f"{folder} holds no event file of TensorBoard; was the run started with --tensorboard?")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every step that is hidden
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

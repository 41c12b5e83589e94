"""The decision of `mpdemo.plan.choose` on a page: its tree, and a table of answers. Used in notebook 11."""

from dataclasses import replace

from tabulate import tabulate

from mpdemo.notebook.bundle import Bundle
from mpdemo.plan.case import LINKS
from mpdemo.plan.choose import choose, tree
from mpdemo.plan.memory import MIB
from mpdemo.settings import SHARING_RUNGS

HEADERS = ("devices", "nodes", "use", "parts", "images at once", "MiB per device", "computing (ms)", "speed-up",
           "sends (ms)")  # fmt: skip


def show_tree() -> Bundle:
    """Display the decision tree that is drawn from the rules."""
    return Bundle(tree(), markdown=f"```mermaid\n{tree()}\n```")


def choice_table(case, devices=((1, 1), (2, 1), (8, 2), (16, 4))) -> Bundle:
    """Display what to use for a case on several numbers of devices.

    Parameters
    ----------
    case : mpdemo.plan.case.Case
    devices : sequence of (int, int)
        Devices and nodes of every row.

    Returns
    -------
    Bundle
        `computing` is what a step takes at least, `speed-up` compares it with one device that had room for all; `sends`
        is how long the busiest device's messages of a step take. "-": no data sheet says it.
    """
    rows = [_row(replace(case, devices=number, nodes=nodes)) for number, nodes in devices]
    columns = {"disable_numparse": True, "colalign": ("right", "right", "left", *["right"] * 6)}
    text = tabulate(rows, HEADERS, "simple", **columns)
    return Bundle(text, markdown=tabulate(rows, HEADERS, "pipe", **columns))


def _row(case):
    choice = choose(case)
    if not choice.rung:
        return case.devices, case.nodes, choice.answer, *["-"] * 6
    predicted, parts = choice.predicted, choice.settings.get("microbatches", 1)
    replicas = choice.settings.get("replicas", case.devices if choice.rung in SHARING_RUNGS else 1)
    one_device, seconds = case.one_device_seconds, predicted.seconds
    return (
        case.devices,
        case.nodes,
        choice.answer,
        parts,
        case.batch // replicas // parts,
        f"{predicted.memory / MIB:,.0f}",
        f"{1000 * seconds:.1f}" if seconds else "-",
        f"{one_device / seconds:.1f}" if seconds else "-",
        f"{1000 * predicted.sent / case.link:.2f}",
    )


def links() -> str:
    """Return the assumed speed of the links, as a sentence."""
    inside, between = (LINKS[one_node] / 1e9 for one_node in (True, False))
    return f"inside a node {inside:g} GB per second, between nodes {between:g} GB per second"

"""Tables for single notebooks: the decision of `mpdemo.plan.choose` (11), scalars of TensorBoard (12)."""

import logging
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.notebook.show import Bundle
from mpdemo.plan.choose import choose
from mpdemo.rules import SHARING_RUNGS

CHOICE = ("devices", "nodes", "use", "parts", "images at once", "MiB per device", "computing (ms)", "speed-up",
          "sends (ms)")  # fmt: skip
DEVICES = ((1, 1), (2, 1), (8, 2), (16, 4))  # and nodes


def choice_table(request) -> Bundle:
    """Display what to use for a `mpdemo.plan.request.PlanRequest` on several numbers of devices and nodes.

    `computing` is what a step takes at least, `speed-up` compares it with one device that had room for all; `sends`
    is how long the busiest device's messages of a step take. "-": no data sheet says it.
    """
    rows = [_choice(replace(request, devices=number, nodes=nodes)) for number, nodes in DEVICES]
    columns = {"disable_numparse": True, "colalign": ("right", "right", "left", *["right"] * 6)}
    return Bundle(tabulate(rows, CHOICE, "simple", **columns), markdown=tabulate(rows, CHOICE, "pipe", **columns))


def _choice(request):
    choice = choose(request)
    if not choice.rung:
        return request.devices, request.nodes, choice.answer, *["-"] * 6
    predicted, parts = choice.predicted, choice.settings.get("microbatches", 1)
    replicas = choice.settings.get("replicas", request.devices if choice.rung in SHARING_RUNGS else 1)
    images, seconds = request.batch // replicas // parts, predicted.seconds
    times = (f"{1000 * seconds:.1f}", f"{request.one_device_seconds / seconds:.1f}") if seconds else ("-", "-")
    memory, sends = f"{predicted.memory / 2**20:,.0f}", f"{1000 * predicted.sent / request.link:.2f}"
    return request.devices, request.nodes, choice.answer, parts, images, memory, *times, sends


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

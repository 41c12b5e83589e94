"""The table of notebook 12: the decision of `mpdemo.plan.choose`."""

from dataclasses import replace

from tabulate import tabulate

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
    memory, sends = f"{predicted.memory / 2**20:,.0f}", f"{1000 * predicted.seconds_sending(request):.2f}"
    return request.devices, request.nodes, choice.answer, parts, images, memory, *times, sends

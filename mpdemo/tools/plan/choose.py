"""Which rung for this model on these devices? The rules, in order, and the answer.

    choice = choose(PlanRequest("resnet101", batch=128, devices=2, optimizer="momentum"))
    print(choice.rung, choice.why)

Taught in notebooks/12_which_one.ipynb.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.options import as_arguments
from mpdemo.predict.request import (
    ACCUMULATION,
    BOTH,
    CHECKPOINTING,
    WAYS,
    WHOLE,
    NotNeeded,
    NotPlanned,
    PlanRequest,
    Prediction,
    Rule,
    mib,
    rules,
)
from mpdemo.tools.plan import fits, own

NOTHING = "none: more devices, or larger ones"
SHARDS = "Weights, gradients and states are too large for one device; {devices} shard them, and the local batch fits"
CUT = "No device holds the whole model, so it is cut over {devices} of {all} devices"
ONE_DEVICE = rules("single", "One device holds the model, and the whole batch fits", fits.replicas, WHOLE)
SEVERAL = (
    *rules("ddp", "Each of {devices} devices holds the model, and the local batch fits", fits.replicas, WHOLE),
    *rules("fsdp", SHARDS, fits.sharded, ("", BOTH)),
    Rule("fsdp", "fsdp" + ACCUMULATION, f"{SHARDS} {WAYS[ACCUMULATION][0]}, in one node",
         partial(fits.sharded, parts=None)),
    *rules("fsdp", SHARDS, fits.sharded, (CHECKPOINTING,)),
    Rule("tensor", "tensor", "The {devices} devices of one node split every layer", fits.split_layers),
    Rule("hybrid", "hybrid", "Fewer than {devices} devices hold the cut model, so there is room for several replicas",
         fits.replicas_of_a_cut),
    Rule("hybrid", "hybrid, sharded", "Fewer than {devices} devices hold the cut model, if its replicas divide "
         "every stage", partial(fits.replicas_of_a_cut, sharded=True)),
    Rule("pipeline", "pipeline", CUT + ", and {parts} microbatches keep them busy", fits.cut),
    Rule("model_parallel", "model_parallel", CUT + "; microbatches do not help here, so the devices work alternately",
         partial(fits.cut, microbatches=1)),
)  # fmt: skip


class Choice(NamedTuple):
    """What to use."""

    rung: str | None  # None where nothing fits
    answer: str  # as in the table of `mpdemo.tools.plan.strategies`
    why: str  # one sentence
    settings: dict  # for ``train_command(**choice.settings, ...)``: rung, batch size, processes, microbatches, ...
    predicted: Prediction | None  # memory, time and messages of a step


def asked(request):
    """Yield each rule for so many devices, and what it finds; None where a strategy cannot be, or is not planned.

    What is not planned of a reader's model is noted, with the reason.
    """
    of_course = SEVERAL if request.devices > 1 else ONE_DEVICE
    for rule in own.rules_of(request) if request.spec.is_own else of_course:
        request.progress(rule.answer)
        try:
            yield rule, rule.find(request)
        except NotNeeded:
            continue
        except NotPlanned as error:
            request.model.not_planned.setdefault(str(error), {})[rule.answer] = None  # a dict keeps their order
            yield rule, None


def choose(request: PlanRequest) -> Choice:
    """Ask the rules in order; the first that fits is the answer.

    Parameters
    ----------
    request : PlanRequest

    Raises
    ------
    UserError
        The nodes do not divide the devices, or every device could hold the model but the batch does not divide.
    """
    if request.devices < 1 or request.nodes < 1 or request.devices % request.nodes:
        raise UserError(
            f"{request.devices} devices in {request.nodes} nodes; allowed: equally many in each node, 1 or more"
        )
    per_device = -(-request.batch // request.devices) * request.devices
    if request.batch % request.devices and _replica_fits(replace(request, batch=per_device)):
        raise UserError(
            f"a batch of {request.batch} does not divide by {request.devices} devices, each of which could hold the "
            f"model; allowed: a multiple of {request.devices}, such as {per_device}"
        )
    for rule, found in asked(request):
        if found and found.memory <= request.limit:
            changes = {"rung": rule.rung, "batch_size": request.batch} | found.settings
            return Choice(rule.rung, rule.answer, _reason(rule, request, found), changes, found)
    why = f"Weights, gradients and optimizer states need {mib(request.states())}; a device has {mib(request.limit)}"
    why += ", too little also for one image." if request.states() <= request.limit else "."
    return Choice(None, NOTHING, why, {}, None)


def _replica_fits(request) -> bool:
    """Return whether each device can hold the whole model."""
    try:
        found = own.replicated(request) if request.spec.is_own else fits.replicas(request)
    except NotPlanned:
        return False
    return found.memory <= request.limit


def _reason(rule, request, found):
    """Return the rule's sentence with its numbers, and the options of ``mpdemo train`` that save memory."""
    parts, used = (found.settings.get(name, 1) for name in ("microbatches", "processes"))
    why = rule.why.format(parts=parts, devices=used, all=request.devices)
    if request.spec.is_own:
        more = f", over {parts} microbatches" if parts > 1 and "{parts}" not in rule.why else ""
        return f"{why}{more}: {mib(found.memory)} of {mib(request.limit)} per device."
    named = {name: value for name, value in found.settings.items() if name not in ("processes", "cut")}
    options = f", by {' '.join(as_arguments(named))}" if named else ""
    return f"{why}: {mib(found.memory)} of {mib(request.limit)} per device{options}."

"""Which rung for this model on these devices? The rules, in order, and the answer.

    choice = choose(PlanRequest("resnet101", batch=128, devices=2, optimizer="momentum"))
    print(choice.rung, choice.why)

Taught in notebooks/11_which_one.ipynb.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.options import as_arguments
from mpdemo.plan import fits
from mpdemo.plan.request import ModelFailed, PlanRequest, Prediction, mib
from mpdemo.rules import CUT_RUNGS


class Rule(NamedTuple):
    """One question of the decision, for several devices or for one, and the answer where it fits."""

    several: bool
    rung: str
    answer: str
    why: str  # a sentence with {parts}, {devices} (that are used) and {all}
    find: Callable  # request -> the first `Prediction` that fits, or that needs least; None where it cannot be done


TWICE = {"activation_checkpointing": True}
WHOLE_MODEL = (  # the answer's second part, how it fits, how to find out
    ("", "at once", fits.replicas),
    (", gradient accumulation", "in {parts} parts, one after the other", lambda request: fits.replicas(request, None)),
    (", bf16", "in bf16", lambda request: fits.replicas(request, None, precision="bf16")),
    (", activation checkpointing", "if activations are computed twice",
     lambda request: fits.replicas(request, None, **TWICE)),
)  # fmt: skip
SHARDED = (
    ("", "at once", fits.sharded),
    (", bf16, activation checkpointing", "in bf16, with activations computed twice",
     lambda request: fits.sharded(request, precision="bf16", **TWICE)),
    (", gradient accumulation", "in {parts} parts, in one node", lambda request: fits.sharded(request, None)),
    (", activation checkpointing", "if activations are computed twice", lambda request: fits.sharded(request, **TWICE)),
)  # fmt: skip
SHARE = "a device's share of the batch fits"
CUT = "No device holds the whole model, so it is cut over {devices} of {all} devices"
RULES = (
    *(Rule(False, "single", "single" + more, f"One device holds the model, and the whole batch fits {how}", find)
      for more, how, find in WHOLE_MODEL),
    *(Rule(True, "ddp", "ddp" + more, f"Each of {{devices}} devices holds the model, and {SHARE} {how}", find)
      for more, how, find in WHOLE_MODEL),
    *(Rule(True, "fsdp", "fsdp" + more, "Weights, gradients and states are too large for one device; "
           f"{{devices}} share them, and {SHARE} {how}", find)
      for more, how, find in SHARDED),
    Rule(True, "tensor", "tensor", "The {devices} devices of one node split every layer", fits.split_layers),
    Rule(True, "hybrid", "hybrid", "Fewer than {devices} devices hold the cut model, so there is room for several "
         "replicas", fits.replicas_of_a_cut),
    Rule(True, "hybrid", "hybrid, sharded", "Fewer than {devices} devices hold the cut model, if its replicas divide "
         "every stage", lambda request: fits.replicas_of_a_cut(request, sharded=True)),
    Rule(True, "pipeline", "pipeline", CUT + ", and {parts} microbatches keep them busy", fits.cut),
    Rule(True, "model_parallel", "model_parallel", CUT + "; microbatches do not help here, so the devices work "
         "alternately", lambda request: fits.cut(request, microbatches=1)),
)  # fmt: skip
NOTHING = "none: more devices, or larger ones"


class Choice(NamedTuple):
    """What to use."""

    rung: str | None  # None where nothing fits
    answer: str  # as in the table of `mpdemo.plan.strategies`
    why: str  # one sentence
    settings: dict  # for ``train_command(**choice.settings, ...)``: rung, batch size, processes, microbatches, ...
    predicted: Prediction | None  # memory, time and messages of a step


def asked(request):
    """Yield each rule for so many devices, and what it finds: None also where a reader's model fails, with a note.

    No rule is asked that would split a reader's model.
    """
    for rule in RULES:
        splits = rule.rung == "tensor" or rule.rung in CUT_RUNGS
        if rule.several == (request.devices > 1) and not (splits and request.spec.is_own):
            try:
                yield rule, rule.find(request)
            except ModelFailed as error:
                note = f"{rule.answer}: {error}"
                request.model.notes += [note] * (note not in request.model.notes)
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
    whole = fits.replicas(replace(request, batch=per_device), None) if request.batch % request.devices else None
    if whole and whole.memory <= request.limit:
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


def _reason(rule, request, found):
    """Return the rule's sentence with its numbers, and the options that save memory."""
    parts, used = (found.settings.get(name, 1) for name in ("microbatches", "processes"))
    why = rule.why.format(parts=parts, devices=used, all=request.devices)
    named = {name: value for name, value in found.settings.items() if name not in ("processes", "cut")}
    options = f", by {' '.join(as_arguments(named))}" if named else ""
    return f"{why}: {mib(found.memory)} of {mib(request.limit)} per device{options}."

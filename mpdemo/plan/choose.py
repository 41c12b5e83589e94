"""Which rung for this model on these devices? The rules, in order, and the answer.

    choice = choose(PlanRequest("resnet101", batch=128, devices=2, optimizer="momentum"))
    print(choice.rung, choice.why)

Taught in notebooks/12_which_one.ipynb.
"""

from dataclasses import replace
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.options import as_arguments
from mpdemo.plan import fits, own
from mpdemo.plan.request import NotNeeded, NotPlanned, PlanRequest, Prediction, Rule, mib

TWICE = {"activation_checkpointing": True}
WHOLE_MODEL = (  # the answer's second part, how it fits, how to find out
    ("", "at once", fits.replicas),
    (", gradient accumulation", "with gradient accumulation over {parts} microbatches",
     lambda request: fits.replicas(request, None)),
    (", bf16", "in bf16", lambda request: fits.replicas(request, None, precision="bf16")),
    (", activation checkpointing", "with activation checkpointing",
     lambda request: fits.replicas(request, None, **TWICE)),
)  # fmt: skip
SHARDED = (
    ("", "at once", fits.sharded),
    (", bf16, activation checkpointing", "in bf16, with activation checkpointing",
     lambda request: fits.sharded(request, precision="bf16", **TWICE)),
    (", gradient accumulation", "with gradient accumulation over {parts} microbatches, in one node",
     lambda request: fits.sharded(request, None)),
    (", activation checkpointing", "with activation checkpointing", lambda request: fits.sharded(request, **TWICE)),
)  # fmt: skip
SHARE = "the local batch fits"
CUT = "No device holds the whole model, so it is cut over {devices} of {all} devices"
RULES = (
    *(Rule(False, "single", "single" + more, f"One device holds the model, and the whole batch fits {how}", find)
      for more, how, find in WHOLE_MODEL),
    *(Rule(True, "ddp", "ddp" + more, f"Each of {{devices}} devices holds the model, and {SHARE} {how}", find)
      for more, how, find in WHOLE_MODEL),
    *(Rule(True, "fsdp", "fsdp" + more, "Weights, gradients and states are too large for one device; "
           f"{{devices}} shard them, and {SHARE} {how}", find)
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
    """Yield each rule for so many devices, and what it finds; None where a strategy cannot be, or is not planned.

    What is not planned of a reader's model is noted, with the reason.
    """
    several = request.devices > 1
    rules = own.rules(request) if request.spec.is_own else [rule for rule in RULES if rule.several == several]
    for rule in rules:
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
        found = own.replicated(request) if request.spec.is_own else fits.replicas(request, None)
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

"""Which rung for this model on these devices? The rules, in order, and the answer.

    choice = choose(Case("resnet101", batch=128, devices=2, optimizer="momentum"))
    print(choice.rung, choice.why)

Taught in notebooks/11_which_one.ipynb.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.options import as_arguments
from mpdemo.plan import fit
from mpdemo.plan.case import Fit, mib
from mpdemo.plan.subject import ModelFailed
from mpdemo.rules import CUT_RUNGS


class Rule(NamedTuple):
    """One question of the decision, for several devices or for one, and the answer where it fits."""

    several: bool
    rung: str
    answer: str
    why: str  # a sentence with {parts}, {devices} (that are used) and {all}
    find: Callable  # of a case: a `Fit`, the first that fits or else what needs least; None where it cannot be done


TWICE = {"activation_checkpointing": True}
WHOLE_MODEL = (  # the answer's second part, how it fits, how to find out
    ("", "at once", fit.replicas),
    (", gradient accumulation", "in {parts} parts, one after the other", lambda case: fit.replicas(case, None)),
    (", bf16", "in bf16", lambda case: fit.replicas(case, None, precision="bf16")),
    (", activation checkpointing", "if activations are computed twice",
     lambda case: fit.replicas(case, None, **TWICE)),
)  # fmt: skip
SHARDED = (
    ("", "at once", fit.sharded),
    (", bf16, activation checkpointing", "in bf16, with activations computed twice",
     lambda case: fit.sharded(case, precision="bf16", **TWICE)),
    (", gradient accumulation", "in {parts} parts, in one node", lambda case: fit.sharded(case, None)),
    (", activation checkpointing", "if activations are computed twice", lambda case: fit.sharded(case, **TWICE)),
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
    Rule(True, "tensor", "tensor", "The {devices} devices of one node split every layer", fit.split_layers),
    Rule(True, "hybrid", "hybrid", "Fewer than {devices} devices hold the cut model, so there is room for several "
         "replicas", fit.replicas_of_a_cut),
    Rule(True, "hybrid", "hybrid, sharded", "Fewer than {devices} devices hold the cut model, if its replicas divide "
         "every stage", lambda case: fit.replicas_of_a_cut(case, sharded=True)),
    Rule(True, "pipeline", "pipeline", CUT + ", and {parts} microbatches keep them busy", fit.cut),
    Rule(True, "model_parallel", "model_parallel", CUT + "; microbatches do not help here, so the devices work "
         "alternately", lambda case: fit.cut(case, microbatches=1)),
)  # fmt: skip
NOTHING = "none: more devices, or larger ones"


class Choice(NamedTuple):
    """What to use."""

    rung: str | None  # None where nothing fits
    answer: str  # as in the table of `mpdemo.plan.strategies`
    why: str  # one sentence
    settings: dict  # for ``train_command(**choice.settings, ...)``: rung, batch size, processes, microbatches, ...
    predicted: Fit | None  # memory, time and messages of a step


def asked(case):
    """Yield each rule for so many devices, and what it finds: None also where a reader's model fails, with a note.

    No rule is asked that would split a reader's model.
    """
    for rule in RULES:
        splits = rule.rung == "tensor" or rule.rung in CUT_RUNGS
        if rule.several == (case.devices > 1) and not (splits and case.subject.is_own):
            try:
                yield rule, rule.find(case)
            except ModelFailed as error:
                note = f"{rule.answer}: {error}"
                case.model.notes += [note] * (note not in case.model.notes)
                yield rule, None


def choose(case) -> Choice:
    """Ask the rules in order; the first that fits is the answer.

    Parameters
    ----------
    case : Case

    Raises
    ------
    UserError
        The nodes do not divide the devices, or every device could hold the model but the batch does not divide.
    """
    if case.devices < 1 or case.nodes < 1 or case.devices % case.nodes:
        raise UserError(f"{case.devices} devices in {case.nodes} nodes; allowed: equally many in each node, 1 or more")
    per_device = -(-case.batch // case.devices) * case.devices
    whole = fit.replicas(replace(case, batch=per_device), None) if case.batch % case.devices else None
    if whole and whole.memory <= case.limit:
        raise UserError(
            f"a batch of {case.batch} does not divide by {case.devices} devices, each of which could hold the model; "
            f"allowed: a multiple of {case.devices}, such as {per_device}"
        )
    for rule, found in asked(case):
        if found and found.memory <= case.limit:
            changes = {"rung": rule.rung, "batch_size": case.batch} | found.settings
            return Choice(rule.rung, rule.answer, _reason(rule, case, found), changes, found)
    why = f"Weights, gradients and optimizer states need {mib(case.states())}; a device has {mib(case.limit)}"
    why += ", too little also for one image." if case.states() <= case.limit else "."
    return Choice(None, NOTHING, why, {}, None)


def _reason(rule, case, found):
    """Return the rule's sentence with its numbers, and the options that save memory."""
    parts, used = (found.settings.get(name, 1) for name in ("microbatches", "processes"))
    why = rule.why.format(parts=parts, devices=used, all=case.devices)
    named = {name: value for name, value in found.settings.items() if name not in ("processes", "cut")}
    options = f", by {' '.join(as_arguments(named))}" if named else ""
    return f"{why}: {mib(found.memory)} of {mib(case.limit)} per device{options}."

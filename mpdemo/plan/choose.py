"""Which rung for this model on these devices? The rules, in order; the answer; and the decision tree drawn from them.

    choice = choose(Case("resnet101", batch=128, devices=2, optimizer="momentum"))
    print(choice.rung, choice.why)

Taught in notebooks/11_which_one.ipynb.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpdemo import settings
from mpdemo.errors import UserError
from mpdemo.plan import fit
from mpdemo.plan.case import Fit, mib
from mpdemo.plan.subject import ModelFailed


@dataclass(frozen=True)
class Rule:
    """One question of the decision, and the answer where it is yes.

    Attributes
    ----------
    several : bool
        Whether it is asked for several devices, or for one.
    rung, answer : str
        What to use, and the text of the tree's leaf.
    why : str
        The reason, one sentence; ``{memory}``, ``{limit}``, ``{parts}``, ``{devices}`` (that are used) and ``{all}``
        are filled in.
    find : callable
        ``find(case)``: a `Fit`, the first that fits or else the one that needs least; None where it cannot be done.
    """

    several: bool
    rung: str
    question: str
    answer: str
    why: str
    find: Callable

    def ask(self, case):
        """Return what `find` does; None where a reader's own model fails, which is then one of its notes."""
        try:
            return self.find(case)
        except ModelFailed as error:
            note = f"{self.answer}: {error}"
            case.model.notes += [note] * (note not in case.model.notes)
            return None


def _counted(how):
    """Return the words for the reason: the number of parts is known by then."""
    return how.replace("in parts", "in {parts} parts")


WHOLE_MODEL = (  # on every device: how it fits, the answer's second part, how to find out
    ("at once", "", lambda case: fit.replicas(case)),
    ("in parts, one after the other", ", gradient accumulation", lambda case: fit.replicas(case, None)),
    ("in bf16", ", bf16", lambda case: fit.replicas(case, None, precision="bf16")),
    ("if activations are computed twice", ", activation checkpointing",
     lambda case: fit.replicas(case, None, activation_checkpointing=True)),
)  # fmt: skip
SHARDED = (
    ("at once", "", lambda case: fit.sharded(case)),
    ("in bf16, with activations computed twice", ", bf16, activation checkpointing",
     lambda case: fit.sharded(case, precision="bf16", activation_checkpointing=True)),
    ("in parts, in one node", ", gradient accumulation", lambda case: fit.sharded(case, None)),
    ("if activations are computed twice", ", activation checkpointing",
     lambda case: fit.sharded(case, activation_checkpointing=True)),
)  # fmt: skip
BATCH, SHARE = "the whole batch", "a device's share of the batch"
USED = "{memory} of {limit} per device"
CUT = "No device holds the whole model, so it is cut over {devices} of {all} devices"
RULES = (
    *(Rule(False, "single", f"Does {BATCH} fit {how}?", "single" + more,
           f"One device holds the model, and {BATCH} fits {_counted(how)}: {USED}.", find)
      for how, more, find in WHOLE_MODEL),
    *(Rule(True, "ddp", f"Does {SHARE} fit {how}, beside the whole model?", "ddp" + more,
           f"Each of {{devices}} devices holds the model, and {SHARE} fits {_counted(how)}: {USED}.", find)
      for how, more, find in WHOLE_MODEL),
    *(Rule(True, "fsdp", f"Weights, gradients and optimizer states are sharded: does {SHARE} fit {how}?",
           "fsdp" + more,
           f"Weights, gradients and states are too large for one device; {{devices}} share them, and {SHARE} fits "
           f"{_counted(how)}: {USED}.", find)
      for how, more, find in SHARDED),
    Rule(True, "tensor", "Do all devices lie in one node, and does it fit if every layer is split?", "tensor",
         f"The {{devices}} devices of one node split every layer: {USED}.",
         fit.split_layers),
    Rule(True, "hybrid", "Does it fit if it is cut over a part of the devices?", "hybrid",
         f"Fewer than {{devices}} devices hold the cut model, so there is room for several replicas: {USED}.",
         fit.replicas_of_a_cut),
    Rule(True, "hybrid", "Does it fit if these replicas also divide every stage among them, as FSDP does?",
         "hybrid, sharded",
         f"Fewer than {{devices}} devices hold the cut model, if its replicas divide every stage: {USED}.",
         lambda case: fit.replicas_of_a_cut(case, sharded=True)),
    Rule(True, "pipeline", "Does it fit if it is cut, with microbatches?", "pipeline",
         CUT + f", and {{parts}} microbatches keep them busy: {USED}.",
         lambda case: fit.cut(case)),
    Rule(True, "model_parallel", "Does it fit if it is cut, with the batch in one piece?", "model_parallel",
         CUT + f"; microbatches do not help here, so the devices work alternately: {USED}.",
         lambda case: fit.cut(case, microbatches=1)),
)  # fmt: skip
NOTHING = "none: more devices, or larger ones"


@dataclass(frozen=True)
class Choice:
    """What to use.

    Attributes
    ----------
    rung : str or None
        None where nothing fits.
    answer, why : str
        The leaf of the tree, and the reason in one sentence.
    settings : dict
        For ``train_command(**choice.settings, ...)``: rung, batch size, processes, microbatches, cut, precision.
    predicted : Fit or None
        Memory, time and messages of a step.
    """

    rung: str | None
    answer: str
    why: str
    settings: dict
    predicted: Fit | None


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
    for rule in (rule for rule in RULES if rule.several == (case.devices > 1)):
        predicted = rule.ask(case)
        if predicted and predicted.memory <= case.limit:
            changes = {"rung": rule.rung, "batch_size": case.batch} | predicted.settings
            return Choice(rule.rung, rule.answer, _reason(rule, case, predicted), changes, predicted)
    why = f"Weights, gradients and optimizer states need {mib(case.states())}; a device has {mib(case.limit)}"
    why += ", too little also for one image." if case.states() <= case.limit else "."
    return Choice(None, NOTHING, why, {}, None)


def _reason(rule, case, predicted):
    parts, used = (predicted.settings.get(name, 1) for name in ("microbatches", "processes"))
    numbers = {"parts": parts, "devices": used, "all": case.devices}
    why = rule.why.format(memory=mib(predicted.memory), limit=mib(case.limit), **numbers)
    named = {name: value for name, value in predicted.settings.items() if name not in ("processes", "cut")}
    return f"{why.removesuffix('.')}, by {' '.join(settings.as_arguments(named))}." if named else why

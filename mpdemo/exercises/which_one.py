"""The checks of notebooks/11_which_one.ipynb: what fits, what it costs, what to use."""

import re

from mpdemo.errors import UserError
from mpdemo.exercises.answers import training_of
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.run import run_on_ranks
from mpdemo.exercises.which_one_ranks import drive_checkpointed
from mpdemo.plan import fit
from mpdemo.plan.case import Case, mib, on_one
from mpdemo.plan.choose import choose
from mpdemo.settings import RUNGS, Settings, checked

MODELS = 0.9e9, 1.2e9, 1.6e9, 3.0e9  # parameters, in exercise 11.1
STORY = {"model": "transformer", "batch": 64, "image_size": 28, "channels": 1, "classes": 10}
RESNET = {"model": "resnet101", "batch": 128, "optimizer": "momentum"}


def large_model():
    """Return a vision transformer with 24 blocks of width 2048: 1.2 billion parameters."""
    from mpdemo.models import Blocks
    from mpdemo.models.transformer import Block, Embed, Head

    blocks = {f"block.{number}": Block(width=2048, heads=16) for number in range(24)}
    embed, head = Embed(channels=3, width=2048, patch=14, tokens=256), Head(width=2048, classes=1000)
    return Blocks({"embed": embed, **blocks, "head": head})


CASES = {  # of exercise 11.6
    "a": Case(**STORY),
    "b": Case(**RESNET, devices=2),
    "c": Case(**RESNET, devices=2, memory=8 * 2**30),
    "d": Case(large_model, batch=64, devices=8),
    "e": Case(large_model, batch=1, devices=2),
}


@exercise("11.1", expects="a list of four times True or False")
def which_have_room(answer):
    require(len(answer) == len(MODELS), f"There are {len(MODELS)} models, and {len(answer)} answers.")
    answer = [bool(value) for value in answer]
    free = 15.25 * 2**30
    forgotten = {12: "one of AdamW's two values", 8: "AdamW's two values", 4: "gradients and AdamW's two values"}
    for count, what in forgotten.items():
        same = answer == [count * model <= free for model in MODELS]
        require(not same, f"This is the answer for {count} bytes per parameter, without {what}.")
    for model, said in zip(MODELS, answer, strict=True):
        claim = f"{model / 1e9:.1f} billion parameters {'fit' if said else 'do not fit'}, says this answer"
        require(said == (16 * model <= free), f"{claim}; count their bytes again.")
    return f"The first needs {16 * MODELS[0] / 2**30:.1f} GiB before the first image: the rest is for the activations."


@exercise("11.2", expects='three words, such as ["halves", "stays", "doubles"]')
def what_accumulation_changes(answer):
    words = ("halves", "stays", "doubles")
    require(len(answer) == 3, f"There are three things to predict, and {len(answer)} answers.")
    for word in answer:
        require(word in words, f"{word!r} is none of the words: {', '.join(words)}.")
    activations, time, gradient = answer
    require(gradient == "stays", f"The gradient {gradient}? The loss of each part is divided by the number of parts.")
    require(time != "halves", "Every image is still computed once, so no time is saved.")
    require(time == "stays", "No image is computed twice; each part takes half as long as the batch.")
    require(activations != "doubles", "After a part's backward pass its activations are freed, before the next part.")
    require(activations == "halves", "Only one part's activations exist at a time.")
    return "So try accumulation first: it costs nearly no time, and without batch norm the training stays the same."


@exercise("11.3", expects='a list of names, such as ["weights", "gradients"]')
def what_autocast_halves(answer):
    kinds = {"weights", "gradients", "optimizer states", "activations"}
    named = {answer} if isinstance(answer, str) else set(answer)
    require(named <= kinds, f"{sorted(named - kinds)} is none of: {', '.join(sorted(kinds))}.")
    wrong = sorted(named & {"weights", "gradients", "optimizer states"})
    require(not wrong, f"Print the dtype of these under autocast: {', '.join(wrong)}. They stay in float32.")
    require(named, "Something becomes smaller: what do the layers hand on?")
    return "So bf16 does not help where the weights, gradients and optimizer states alone are too large."


@exercise("11.4", expects="a program that defines forward(blocks, x)")
def compute_twice(path):
    result = run_on_ranks(path, drive_checkpointed, processes=1)[0]
    require(result["shape"], "The result has another shape than that of the blocks, one after the other.")
    require(not result["missing"], f"{result['missing']} of the parameters got no gradient.")
    require(result["difference"] < 1e-4, "The gradients are not those of the plain blocks.")
    calls, blocks = result["calls"], result["blocks"]
    require(calls > blocks, f"Forward and backward called {calls} blocks, each once: nothing is computed twice.")
    require(calls >= 2 * blocks - 1, f"Forward and backward called {calls} blocks: some are computed once only.")
    share = result["peak"] / result["plain"]
    too_high = f"The peak is {share:.2f} times that of the plain blocks"
    require(share < 0.75, f"{too_high}: the backward pass computes too many blocks again before it frees any.")
    return f"Forward and backward called {calls} blocks instead of {blocks}, at {share:.2f} times the peak memory."


@exercise("11.5", expects="a whole number")
def smallest_number_of_devices(answer):
    mistakes = {2: "the weights alone", 3: "weights and gradients", 4: "one of AdamW's values too few"}
    require(answer not in mistakes, f"{answer} devices hold {mistakes.get(answer)}.")
    require(answer >= 5, f"{answer} devices have {15.25 * answer:.1f} GiB in all, too little.")
    require(answer == 5, f"{answer} devices are enough, but a smaller number is, too.")
    return "Little room is left for activations then: a real plan takes a few devices more."


@exercise("11.6", expects=f"a list of five of: {', '.join(RUNGS)}")
def decide_five_cases(answer):
    require(len(answer) == len(CASES), f"There are {len(CASES)} cases, and {len(answer)} answers.")
    for (name, case), rung in zip(CASES.items(), answer, strict=True):
        require(rung in RUNGS, f"{rung!r} is no rung; allowed: {', '.join(RUNGS)}.")
        if rung != choose(case).rung:
            raise Wrong(f"Case {name} is not {rung}: {_why_not(case, rung)}")
    return "The order of the questions decides: a model is cut only where nothing before it fits."


def _why_not(case, rung):
    whole = fit.replicas(case, None)
    whole = whole if whole and whole.memory <= case.limit else None
    if case.devices == 1:
        return "there is one device, so nothing can be shared."
    if rung == "single":
        return f"{case.devices - 1} of the {case.devices} devices would do nothing."
    if rung == "data_parallel":
        return "one process for all devices has one GIL and cannot use a second node (notebook 02)."
    if whole:
        parts = whole.settings.get("microbatches", 1)
        how = f"in {parts} parts" if parts > 1 else "at once"
        return f"a device holds the whole model, its share {how}: {mib(whole.memory)} of {mib(case.limit)}."
    if rung == "ddp":
        return f"every device would hold {mib(case.states())} of weights, gradients and states, and has less."
    if rung == "tensor":
        return "this package splits the layers of the story's model alone."
    if rung == "fsdp":
        return f"{case.devices} devices need {case.devices} images at least, one each."
    if choose(case).rung == "fsdp":
        return "the devices can share its weights, gradients and states; a cut is tried after that."
    if case.batch == 1:
        return "one image cannot be cut into microbatches."
    return "the devices would work in turn, although the batch has enough images to keep all busy."


@exercise("11.7", expects="a dict of settings")
def write_the_settings(answer):
    case = Case(**RESNET, devices=8, memory=3 * 2**30)
    settings = _checked({"model": case.model, "dataset": "imagenet", "batch_size": case.batch} | answer)
    require(settings.batch_size == case.batch, f"The batch has {settings.batch_size} images; it was to stay at 128.")
    require(settings.devices == 8, f"This uses {settings.devices} of the 8 devices.")
    require(settings.rung == choose(case).rung, f"{settings.rung} would run; but {_why_not(case, settings.rung)}")
    require(settings.optimizer == "sgd", f"It would train with {settings.optimizer}.")
    share, parts = case.batch // 8, settings.microbatches
    precision = "fp32" if settings.precision == "fp32" else "bf16"
    used = on_one(case, share, parts, precision, settings.activation_checkpointing).peak
    require(used <= case.limit, f"Each device would need {mib(used)} and has {mib(case.limit)}.")
    _require_no_more(settings, choose(case).settings)
    return f"Each device needs {mib(used)} of {mib(case.limit)}; choose() answers: {choose(case).answer}."


def _require_no_more(settings, wanted):
    """Require that a training that fits does nothing for which the rules ask later: `wanted` is what they answer."""
    more = {
        f"computes in {settings.precision}": settings.precision != wanted.get("precision", "fp32"),
        "computes activations twice": settings.activation_checkpointing
        != wanted.get("activation_checkpointing", False),
        f"cuts the share into {settings.microbatches} parts": settings.microbatches > wanted.get("microbatches", 1),
    }
    for what, is_more in more.items():
        require(not is_more, f"It fits, but it {what}: the rules find an answer before they ask for that.")


def _checked(values):
    try:
        return checked(Settings(**values))
    except UserError as error:
        raise Wrong(f"The training would refuse it: {error}.") from None


@exercise("11.8", expects="a job file")
def repair_the_plan(path):
    text = path.read_text()
    _, settings = training_of(text)
    settings = _checked(settings.as_dict() | {"processes": 4})
    case = Case(**STORY, devices=4)
    require((settings.model, settings.batch_size) == (case.model, case.batch), "It now trains another model or batch.")
    require(settings.optimizer == case.optimizer, f"It now trains with another optimizer: {settings.optimizer}.")
    tasks = re.search(r"^#SBATCH --ntasks-per-node=(\d+)", text, re.M)
    require(tasks and tasks[1] == "4", "It does not start four processes, one per device.")
    require(settings.rung == choose(case).rung, f"{settings.rung} would run; but {_why_not(case, settings.rung)}")
    parts = settings.microbatches
    require(parts == 1, f"Each device's share would be cut into {parts} parts, although it fits at once.")
    require(settings.cut is None, "A part of the old plan is still in the command: DDP cuts nothing.")
    _require_no_more(settings, choose(case).settings)
    return "It ran before, too: only the memory that stayed empty said that it was the wrong plan."

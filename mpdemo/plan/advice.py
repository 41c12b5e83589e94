"""Which rung to use on so many devices, and what every other one would take: ``python -m mpdemo plan --devices``.

Taught in notebooks/11_which_one.ipynb.
"""

from mpdemo.errors import UserError
from mpdemo.plan import strategies
from mpdemo.plan.case import Case
from mpdemo.plan.choose import choose
from mpdemo.plan.memory import MIB, RESERVE
from mpdemo.plan.roofline import ROOFS
from mpdemo.settings import as_arguments


def text(request) -> str:
    """Return which rung to use on ``--devices``, why, all rungs in a table, and the command for each that fits."""
    if request.gpu_memory is None:
        raise UserError("--devices needs --gpu-memory: of one device, such as 16GiB")
    if request.cost == "measure":
        raise UserError(f"--devices estimates the times; allowed: --cost {', '.join(ROOFS)}")
    names = ("batch", "devices", "nodes", "optimizer", "image_size", "classes", "channels", "norm")
    options = {name: getattr(request, name) for name in names}
    case = Case(_model(request), memory=request.gpu_memory, gpu=request.cost or "v100", **options)
    choice, rows = choose(case), strategies.compare(case)
    lines = [f"{choice.answer}: {choice.why}", "", strategies.table(case, rows)]
    lines += [
        f"(times estimated for a {case.gpu} in float32, no message hidden; memory without CUDA's {RESERVE // MIB} MiB)"
    ]
    if uncut := getattr(case.model, "uncut", ""):
        lines += [f"the model is planned as one block: {uncut}"]
    if not choice.rung and (offers := strategies.changes_that_fit(case)):
        lines += [f"what would fit: {', or '.join(offers)}"]
    return "\n".join([*lines, "", *_commands(request, rows)]).rstrip()


def _model(request):
    """Return the model as `Case` takes it: its name, or the reader's own."""
    if not request.own_model and (request.input or request.tokens):
        raise UserError("--input and --tokens belong to a model of your own, --model package.module:function")
    if request.own_model and not request.input:
        raise UserError("a model of your own needs --input, the shape of a sample, such as 3,224,224")
    if not request.own_model:
        return request.model
    from mpdemo.models.own import OwnModel

    return OwnModel(request.model, tuple(map(int, request.input.split(","))), request.tokens)


def _commands(request, rows):
    """Return the lines that say how to train what fits."""
    if request.own_model:
        return ["to train your own model: notebooks/take_home/train_ddp.py is a whole script, in plain PyTorch"]
    lines = []
    for row in (row for row in rows if row.fits):
        settings = {"rung": row.rung, "batch_size": request.batch, "image_size": request.image_size}
        words = " ".join(as_arguments(settings | row.predicted.settings))
        lines.append(f"{row.answer}:\n  python -m mpdemo train --model {request.model} {words}")
    return lines

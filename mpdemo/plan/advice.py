"""Which rung to use on so many devices, and what every other one would take: ``python -m mpdemo plan --devices``.

Taught in notebooks/11_which_one.ipynb.
"""

from dataclasses import replace

from mpdemo.errors import UserError
from mpdemo.plan import strategies
from mpdemo.plan.case import Case, on_one
from mpdemo.plan.choose import choose
from mpdemo.plan.footprint import ROOFS
from mpdemo.plan.machine import measured, memory_per_device, require_devices, step_seconds
from mpdemo.plan.strategies import ONE_DEVICE
from mpdemo.plan.subject import MIB, RESERVE
from mpdemo.settings import Settings, as_arguments, checked
from mpdemo.world.devices import gpus_here


def answer(request) -> tuple:
    """Return what to use on ``--devices``, why, a table of all and the commands, as text; and the rows of the table."""
    if request.gpu_memory is None:
        raise UserError("--devices needs --gpu-memory: of one device, such as 16GiB")
    measuring = request.cost == "measure"
    if measuring and request.nodes > 1:
        raise UserError(f"--cost measure measures in one node, not in --nodes {request.nodes}; allowed: --cost v100")
    if measuring:
        require_devices(request.devices)
    names = ("batch", "devices", "nodes", "optimizer", "image_size", "classes", "channels", "norm")
    options = {name: getattr(request, name) for name in names}
    sheet = request.cost if request.cost in ROOFS else "a100"
    case = Case(_model(request), memory=request.gpu_memory, gpu=sheet, **options)
    choice = choose(case)  # refuses what no device can do, before minutes are spent on measuring
    if measuring and request.own_model:
        case = _with_measured_blocks(request, case)
        choice = choose(case)
    rows = strategies.compare(case)
    seconds = _measured_steps(request, case, rows) if measuring and not request.own_model else {}
    lines = [f"{choice.answer}: {choice.why}", "", strategies.table(case, rows, seconds)]
    if measuring and not (seconds or case.machine):
        lines += ["(--cost measure: no step could be measured within this machine's memory and the --budget)"]
    lines += [f"({_source(case, seconds)}; memory without CUDA's {RESERVE // MIB} MiB)"]
    if uncut := getattr(case.model, "uncut", ""):
        lines += [f"no pipeline: the model is planned as one block, since {uncut}"]
    lines += [f"note: {note}" for note in getattr(case.model, "notes", [])]
    text = "\n".join([*lines, "", *_commands(request, rows)]).rstrip()
    return text, [strategies.as_row(case, row, seconds) for row in rows]


def _source(case, seconds) -> str:
    """Return where the times come from."""
    several = "s" if case.devices > 1 else ""
    here = f"{case.devices} {'GPU' if gpus_here() else 'CPU core'}{several} of this machine in float32"
    if seconds:
        return f"steps of each strategy measured on {here}"
    if case.machine:
        sent = ", the bytes of messages, none hidden, and" if case.devices > 1 else " and"
        return f"steps on {here}: blocks in batches of up to {max(case.machine.costs)}{sent} the update were measured"
    return f"times estimated for a {case.gpu} in float32, no message hidden"


def _with_measured_blocks(request, case):
    """Return the case with what its devices take, measured; unchanged where this machine's memory has no room."""
    wanted = {2, 8, 32, 128, case.batch // case.devices, case.batch}  # between these, costs lie on a line
    wanted = [size for size in wanted if 2 <= size <= max(case.batch, 8)]
    copies = 0 if case.model.is_flat else len(wanted) - 1  # a traced model takes one size alone
    more = copies * sum(block.weights for block in case.blocks())
    sizes = [size for size in wanted if _has_room(case, size, more)]
    return replace(case, machine=measured(request, sizes, case.devices)) if len(sizes) > 1 else case


def _has_room(case, size, more=0) -> bool:
    """Whether each device can hold what is measured.

    That is the whole model with its gradients and the optimizer's states, a microbatch beside a copy of them, and
    `more` bytes.
    """
    needed = on_one(case, size, 1).peak + case.states() + more
    return needed <= min(case.limit, memory_per_device(case.devices))


def _model(request):
    """Return the model as `Case` takes it: its name, or the reader's own."""
    if not request.own_model and (request.input or request.tokens):
        raise UserError("--input and --tokens belong to a model of your own, --model package.module:function")
    if not request.own_model:
        return request.model
    from mpdemo.models.own import OwnModel

    return OwnModel.wanted(request)


def _commands(request, rows):
    """Return the lines that say how to train what fits."""
    if request.own_model:
        return ["to train your own model: notebooks/scripts/train_ddp.py is a whole script, in plain PyTorch"]
    lines = []
    for row in (row for row in rows if row.fits):
        words = " ".join(as_arguments(_settings(request, row.rung, row.predicted.settings)))
        lines.append(f"{row.answer}:\n  python -m mpdemo train {words}")
    return lines


def _settings(request, rung, more) -> dict:
    """Return the settings of a training run on a rung, with `more` of them."""
    settings = {"model": request.model, "rung": rung}
    settings |= {"optimizer": "adamw"} if request.optimizer == "adamw" else {}
    settings |= {"norm": request.norm} if request.norm != "batch" else {}
    return settings | {"batch_size": request.batch, "image_size": request.image_size} | more


def _measured_steps(request, case, rows) -> dict:
    """Return the seconds of a step by their answers for all strategies that fit, and for one device.

    They are None where nothing is predicted, and where ``--budget`` was spent before. Where all are, it is {}.
    """
    words = {row.answer: _settings(request, row.rung, row.predicted.settings) for row in rows if row.fits}
    words[ONE_DEVICE] = _settings(request, "single", {})
    settings = {name: Settings(**own) for name, own in words.items()}
    wanted = list(dict.fromkeys(s for s in settings.values() if _can_be_measured(s, case)))
    seconds = dict(zip(wanted, step_seconds(request, wanted), strict=True)) if wanted else {}
    return {name: seconds.get(s) for name, s in settings.items()} if any(seconds.values()) else {}


def _can_be_measured(settings, case) -> bool:
    """Whether a step takes all devices, and each can hold it beside a copy of the model."""
    if settings.processes not in (None, case.devices):
        return False
    s = checked(settings, case.devices if settings.rung != "single" else None)
    shares = s.devices if s.rung in ("ddp", "fsdp") else s.replicas or 1
    return _has_room(case, s.batch_size // shares // s.microbatches)

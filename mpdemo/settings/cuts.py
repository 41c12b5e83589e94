"""Where a model can be cut: the names of its blocks, and a cut as a user writes it. Needs no PyTorch.

So a command line or a notebook refuses an impossible cut at once. Taught in notebooks/30_two_stages.ipynb.
"""

from itertools import pairwise

from mpdemo.errors import QUOTED, UserError

DEPTH = 8  # equal blocks of the transformer and of the convolution stack
PATCH, HEADS = 7, 6  # of the transformer: pixels per side of a token, heads of its attention
# blocks per layer
RESNETS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


def block_names(model) -> list[str]:
    """Return the names of a model's blocks, in order, as `mpdemo.models.build` gives them."""
    if model in RESNETS:
        layers = enumerate(RESNETS[model], 1)
        return ["stem", *(f"layer{layer}.{i}" for layer, count in layers for i in range(count)), "head"]
    if model == "toy":
        return [f"linear{i}" for i in range(1, 5)]
    if model == "convnet":
        return ["layer1", "layer2", "fc"]
    return ["embed", *(f"block.{i}" for i in range(DEPTH)), "head"]  # transformer, convstack


def resolve_cut(names, cut, stages) -> list[int]:
    """Turn a cut as a user writes it into block indices, each the first block of the next stage.

    A cut says where each of the `stages` but the last ends: the name of its last block (``layer2.3``), or the number of
    blocks up to there (``9``), separated by commas or in a list. None: stages of equally many blocks.
    """
    count = len(names)
    if stages > count:
        raise UserError(f"{stages} stages do not fit a model of {count} blocks; allowed: 1 to {count}")
    if cut in (None, ""):
        return [round(count * i / stages) for i in range(1, stages)]
    points = [_cut_point(names, entry) for entry in (cut.split(",") if isinstance(cut, str) else cut)]
    if len(points) != stages - 1:
        raise UserError(
            f"the cut {QUOTED.repr(cut)} gives {len(points) + 1} stages, but {stages} are wanted: name {stages - 1}"
        )
    if any(start >= stop for start, stop in pairwise([0, *points, count])):
        raise UserError(
            f"the cut {QUOTED.repr(cut)} leaves a stage empty or is not increasing (block numbers {points}); "
            f"allowed: increasing, from 1 to {count - 1}"
        )
    return points


def check_split(model, parts):
    """Refuse to split the layers of a model into parts that do not come out equal."""
    if model != "transformer":
        raise UserError(
            f"--rung tensor splits the layers of --model transformer alone, not of {model}; or --rung fsdp"
        )
    if HEADS % parts:
        allowed = ", ".join(str(n) for n in range(2, HEADS + 1) if HEADS % n == 0)
        raise UserError(
            f"the transformer's {HEADS} heads do not divide by {parts} processes; allowed: {allowed}"
        )


def _cut_point(names, entry) -> int:
    """Return the number of blocks before a cut, from a block's name (cut after it) or from a number."""
    entry = str(entry).strip()
    if entry in names:
        return names.index(entry) + 1
    if entry.isdecimal() and len(entry) < 5 and 1 <= int(entry) < len(names):
        return int(entry)
    allowed = f"a number from 1 to {len(names) - 1} or a block: {', '.join(names[:-1])}"
    raise UserError(f"cannot cut after {QUOTED.repr(entry)}; allowed: {allowed}")

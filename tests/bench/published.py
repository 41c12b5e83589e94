"""Plan training runs whose speed others have published (published.toml), and print both as the tables of published.md.

    python tests/bench/published.py [--write] [part of a source's or a model's name]

Above each group's table stands how many come out within 20 and 30 % and inside the interval; --write puts the tables
into published.md. All take about ten minutes.
"""

import argparse
import re
import tomllib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    import sys

    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]  # tests, tests/bench

from mpdemo.paths import root
from mpdemo.tools.plan import own
from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.request import PlanRequest

HEADS = (
    "source",
    "model",
    "GPUs",
    "a device's step",
    "published",
    "planned",
    "ratio",
    "before",
    "inside",
    "GiB",
    "planned",
)
HEADINGS = {"chose": "Runs that chose numbers", "known": "Runs that were known", "blind": "Blind runs"}
PAGE = root() / "tests/bench/published.md"
SHAPES = {"DiT-XL/2": (4, 32, 32), "nnU-Net 3D": (4, 128, 128, 128), "DINO ViT-S": None, "GPT 1B": None}


class Run(NamedTuple):
    """A published run: `batch` samples of a device, or of all that split layers, in each of `parts` microbatches."""

    source: str
    model: str
    gpu: str
    devices: int
    mesh: str  # as `plan` calls it
    precision: str
    length: int  # tokens of a sample, or pixels of a side
    batch: int
    group: str  # "chose" a number of the plan, "known" while numbers were chosen, "blind"
    seconds: float | None = None  # of a step
    gib: float | None = None
    parts: int = 1
    nodes: int = 0  # of eight devices, if it isn't said
    again: str = ""  # what is computed twice, as `plan` calls it
    compiled: bool = False  # or fused by hand
    optimizer: str = "adamw"
    half: bool = False  # weights, gradients and states in bfloat16
    adapters: int = 0  # rank of the model's own
    norms: bool = True  # in one kernel each
    was: float | None = None  # planned over published before the plan last changed, or when first entered
    when: str = ""  # a blind run was entered
    note: str = ""

    @property
    def kind(self):
        """The kind of row that it is compared with."""
        return self.mesh.rstrip(" 0123456789") + (f", {self.precision}" if self.precision != "fp32" else "")


def runs() -> list:
    """Return the published runs."""
    return [
        Run(**run) for run in tomllib.loads((root() / "tests/bench/published.toml").read_text())["runs"]
    ]


def compared() -> dict:
    """Count the runs with a time that chose no number, by kind of row: HSDP is FSDP within a node, and they share."""
    found = Counter(
        run.kind
        for run in set(runs())
        if run.group != "chose" and run.seconds and not run.source.startswith("our")
    )
    both = found["fsdp, bf16"] + found["hsdp, bf16"]
    return dict(found) | {"fsdp, bf16": both, "hsdp, bf16": both}


def model_of(run):
    """Return the model of a run."""
    from published_models import build

    shape = SHAPES.get(
        run.model, (3, run.length, run.length) if run.model.startswith("Res") else (run.length,)
    )
    make = partial(build, run.model, run.length, run.half, run.adapters, run.norms)
    return OwnModel(run.model, shape, shape == (run.length,), make)


def planned(run, model):
    """Return what the plan says of a run."""
    nodes = run.nodes or -(-run.devices // 8)
    replicas = 1 if run.mesh == "tensor" else run.devices
    tensor = int(run.mesh.partition("tensor ")[2] or 1)
    batch = run.batch * run.parts * replicas // tensor
    request = PlanRequest(model, batch, run.devices, nodes, GPUS[run.gpu].memory, run.optimizer, run.gpu,
                          precision=run.precision, compiled=run.compiled, everything=True)  # fmt: skip
    way = own.AGAIN[run.again] | {"precision": run.precision, "parts": (run.parts,)}
    if run.half:  # nothing to cast
        way["precision"] = "fp32"
    find = {"single": own.replicated, "ddp": own.replicated, "tensor": own.split_layers}.get(
        run.mesh.partition(",")[0], own.sharded
    )
    more = {"rank": own.RANK} if "LoRA" in run.mesh else {"hsdp": True} if run.mesh == "hsdp" else {}
    more |= {"tensor": tensor} if tensor > 1 else {}
    return own.with_times(request, partial(find, **way, **more))


def cells(run, found) -> tuple:
    """Return a run as the cells of its line, and its ratios of time and memory, and whether it lies inside."""
    how = [
        f"{run.batch * run.parts} x {run.length:,}",
        run.mesh,
        run.precision,
        run.again[2:],
        "compiled" * run.compiled,
    ]
    seconds, ratio, inside, before = "", None, None, "" if run.was is None else f"{run.was:.2f}"
    if run.seconds:
        time = found.compiled if run.compiled else found.seconds
        ratio, seconds = time / run.seconds, f"{time:.3f} s"
        if found.between:
            low, high = found.between
            inside, seconds = low <= run.seconds <= high, f"{seconds} ({low:.3f} to {high:.3f})"
    memory = found.memory / 2**30
    line = run.source, run.model, f"{run.devices} {run.gpu}", ", ".join(filter(None, how))
    line += f"{run.seconds:.3f} s" if run.seconds else "", seconds, f"{ratio:.2f}" if ratio else "", before
    line += (
        {True: "yes", False: "no", None: ""}[inside],
        f"{run.gib:.1f}" if run.gib else "",
        f"{memory:.1f}",
    )
    return line, ratio, inside, run.gib and memory / run.gib


def score(rows) -> str:
    """Say how near the plans of some runs are."""
    ratios, inside, memory = ([row[n] for row in rows if row[n] is not None] for n in (1, 2, 3))
    within = [sum(1 / (1 + off) <= ratio <= 1 + off for ratio in ratios) for off in (0.2, 0.3)]
    near = sum(0.9 <= ratio <= 1.1 for ratio in memory)
    return (
        f"{len(ratios)} times: {within[0]} within 20 %, {within[1]} within 30 %; {sum(inside)} of {len(inside)} inside "
        f"the interval; memory: {near} of {len(memory)} within 10 %"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("part", nargs="*")
    args = parser.parse_args()
    if args.write and args.part:
        parser.error("--write is for all runs")
    models, groups = {}, {group: [] for group in HEADINGS}
    for run in [run for run in runs() if " ".join(args.part) in f"{run.source} {run.model}"]:
        key = run.model, run.length, run.half, run.adapters, run.norms
        if key not in models:
            models[key] = model_of(run)
        groups[run.group].append(cells(run, planned(run, models[key])))
        print(" | ".join(groups[run.group][-1][0]), flush=True)
    page = PAGE.read_text()
    for group, heading in HEADINGS.items():
        lines = [HEADS, ["---"] * len(HEADS), *(row[0] for row in groups[group])]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        print(text := f"\n{score(groups[group])}.\n\n{table}\n")
        begins = rf"(## {heading}[^\n]*\n).*?(?=\n## |\Z)"
        page = re.sub(begins, lambda old, text=text: old[1] + text, page, flags=re.DOTALL)
    if args.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()

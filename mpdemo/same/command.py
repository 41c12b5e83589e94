"""``python -m mpdemo same``: is a script of your own the same training with 1 and N processes, and does it resume?"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.options import count
from mpdemo.same import compare, resume
from mpdemo.same.watcher import Watcher
from mpdemo.same.worlds import refuse
from mpdemo.world.devices import gpus_here

BY_NATURE = {
    "dropout": "dropout: each rank draws its own",
    "batchnorm": "BatchNorm: each rank normalizes its own part of the batch (SyncBatchNorm on GPUs uses all of it)",
    "augmentation": "random augmentation: each process draws its own",
}


def add_arguments(parser):
    """Add the options; the script and its arguments stand after ``--``."""
    parser.epilog = "{64} in ARGS is 64 divided by the number of processes, {n} is that number."
    option, some = parser.add_argument, count(1, 10**6)
    option("--processes", default="1,2", help="the first is compared with the others (default: 1,2)")
    option("--batches", type=some, default=8, help="of each epoch and loader (default: 8)")
    option("--without", default="", help="switch off: dropout, batchnorm, augmentation")
    option("--python", default=sys.executable, help="the interpreter of your environment; it needs PyTorch")
    option("--timeout", type=some, default=120, help="seconds without a step or batch (default: 120)")
    option("--json", default="", help="also write the verdict to this file")
    option("--resume", action="store_true", help="stop the script and start it again: does it resume?")
    option("script", nargs=argparse.REMAINDER, metavar="-- train.py ARGS", help="run as torchrun would")


def main(args) -> int:
    """Run the script, print the verdict; return 0 for the same training, 1 for another."""
    counts = checked(args)
    with Watcher(args) as watcher:
        verdicts = [resume.verdict(watcher, counts[-1], counts[0])] if args.resume else verdicts_of(watcher, counts)
    for verdict in verdicts:
        show(verdict)
    same = not any(verdict["findings"] for verdict in verdicts)
    if args.json:
        records = [verdict | {"findings": [f.record() for f in verdict["findings"]]} for verdict in verdicts]
        Path(args.json).write_text(json.dumps({"same": same, "worlds": records}, indent=2) + "\n")
    return 0 if same else 1


def checked(args) -> list:
    """Refuse bad input before a process starts; return the numbers of processes."""
    args.script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not args.script:
        raise UserError("no script given; write it after --, such as: python -m mpdemo same -- train.py --epochs 2")
    if not Path(args.script[0]).is_file():
        raise UserError(f"script {args.script[0]!r} is no file; give the path of a Python script")
    words = args.processes.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words) or len(words) < 2 and not args.resume:
        raise UserError(f"--processes {args.processes!r} is not allowed; allowed: two numbers or more, such as 1,2")
    counts, here = [int(word) for word in words], gpus_here() or len(os.sched_getaffinity(0))
    if max(counts) > here:
        raise UserError(f"--processes {args.processes}: this machine has {here} devices; give {here} or less")
    if not shutil.which(args.python):
        raise UserError(f"--python {args.python}: no such program; give the path of a Python with PyTorch")
    args.python = os.path.abspath(shutil.which(args.python))
    args.without = set(args.without.split(",")) - {""}
    if unknown := sorted(args.without - set(BY_NATURE)):
        raise UserError(f"--without {unknown[0]!r} is not allowed; allowed: {', '.join(BY_NATURE)}")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise UserError(f"--json {args.json!r}: its folder does not exist; make it first")
    return counts


def verdicts_of(watcher, counts) -> list:
    """Run the script with each number of processes, then with the first; compare."""
    without = watcher.args.without
    several = [watcher.run_new(count, without=without) for count in counts[1:]]
    one = watcher.run_new(counts[0], without=without)
    refuse(one)
    return [verdict(watcher, one, many) for many in several]


def verdict(watcher, one, many) -> dict:
    """Compare two worlds; what differs by nature is switched off on a second try."""
    findings, one, order = compared(watcher, one, many, watcher.args.without)
    chance = sorted((many.names("chance") | one.names("chance")) - watcher.args.without)
    notes = [f"{one} draws another order: it was given the batches of {many.processes}"] if order else []
    if chance and any(f.name in ("another gradient", "mean of means", "loss of one rank") for f in findings):
        without = watcher.args.without | set(chance)
        one, many = (watcher.run_new(world.processes, without=without) for world in (one, many))
        findings, one, _ = compared(watcher, one, many, without)
        notes += [f"{BY_NATURE[name]}; switched off for the comparison" for name in chance]
    notes += [f"the samples of {name} have no numbers: not compared" for name in sorted(many.names("unseen"))]
    if many.loader is None and not many.names("unseen"):
        notes.append("no DataLoader with a batch sampler seen: the samples are not compared")
    said = "NOT the same training" if findings else "the same training" + ", in another order" * order
    return {"processes": many.processes, "findings": findings, "notes": notes, "table": table(one, many), "said": said}


def compared(watcher, one, many, without) -> tuple:
    """Return the findings, the world of one process as it was compared, and whether it was given another order."""
    findings, order = list(compare.of_data(one, many)), False
    if not many.steps or many.how != "ended" or many.error:
        what = many.error or f"nothing new for {many.order['limit']} s after {len(many.steps)} steps"
        return findings or [compare.Finding("fails with several" if many.error else "hangs", what)], one, order
    findings += [*compare.of_model(many), *compare.of_ranks(many)]
    if {finding.name for finding in findings} <= {"no set_epoch", "parameters without gradient"}:
        pairs = zip(one.in_steps(), many.in_steps(), strict=False)
        if any(own != drawn for own, drawn in pairs):
            replay, order = {str(one.loader): many.batches()}, True
            one = watcher.run_new(one.processes, without=without, replay=replay)
        findings += list(compare.of_steps(one, many)) or compare.of_log(one, many)
    return [*findings, *compare.of_messages(many), *compare.of_files(many)], one, order


def table(one, many) -> dict:
    """Return what both worlds did, a row each."""
    pairs = list(zip(one.steps, many.steps, strict=False))
    far = max((compare.distance(a["gradient"], b["gradient"]) for a, b in pairs), default=None)
    rows = {"processes": [one.processes, many.processes], "steps": [len(one.steps), len(many.steps)]}
    for name, show in {
        "samples per step": lambda world: len(world.in_steps()[0]) if world.loader is not None else "not seen",
        "first gradient": lambda world: f"{world.steps[0]['gradient']:.6g}",
        "last gradient": lambda world: f"{world.steps[-1]['gradient']:.6g}",
        "last weights": lambda world: f"{world.steps[-1]['weights']:.6g}",
        "learning rate": lambda world: f"{world.steps[-1]['rates'][0]:.6g}",
        "messages per step": messages,
    }.items():
        rows[name] = [show(world) if world.steps else "-" for world in (one, many)]
    return rows | {"largest difference of a gradient": ["", "-" if far is None else f"{far:.1g}"]}


def messages(world) -> str:
    """Return how many collectives a step has; those of DDP are made below Python."""
    calls = sum(world.steps[-1]["calls"].values())
    synced = sum(bool(part["synced"]) for part in world.steps[-1]["parts"])
    return f"{calls} + DDP's in {synced} of {len(world.steps[-1]['parts'])} parts" if synced else str(calls)


def show(verdict):
    """Print a verdict."""
    rows = [[name, *values] for name, values in verdict["table"].items()]
    print(tabulate(rows[1:], headers=rows[0], disable_numparse=True))
    print(f"\n{verdict['processes']} processes: {verdict['said']}")
    print(*verdict["findings"], *(f"  {note}" for note in verdict["notes"]), "", sep="\n")

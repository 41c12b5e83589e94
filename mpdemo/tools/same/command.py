"""``mpdemo same``: is a script of your own the same training with 1 and N processes, and does it resume?"""

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

from tabulate import tabulate

from mpdemo import __version__, foreign
from mpdemo.errors import UserError, did_you_mean
from mpdemo.options import count
from mpdemo.tools.same import resume
from mpdemo.tools.same.finding import BY_NATURE, TABLE, VERDICTS
from mpdemo.tools.same.verdict import verdicts_of
from mpdemo.tools.same.watcher import Watcher
from mpdemo.tools.terminal import coloured, wrapped
from mpdemo.world.devices import gpus_here
from mpdemo.world.processes import cores_here

BEGIN = """mpdemo same runs your training script with one process and with two: is it the same training?

    mpdemo same -- train.py --batch-size {64}       {64}: 64 divided by the number of processes, where it is per process
    mpdemo same --device cpu -- train.py            a script that is written for GPUs, on CPU processes
    mpdemo same --resume -- train.py                stopped and started again: does it resume?
    mpdemo same --python .venv/bin/python -- ...    the interpreter of your environment; it needs PyTorch 2.6 or later

It prints same, different or unsure, the first link of a step that breaks, the line and the remedy. More: --help"""
FORMAT = 2  # of what --json writes: another number if a name in it changes its meaning


def add_arguments(parser):
    """Add the options; the script and its arguments stand after ``--``."""
    parser.epilog = "{64} in ARGS is 64 divided by the number of processes, {n} is that number."
    option, some = parser.add_argument, count(1, 10**6)
    option("--processes", default="1,2", help="the first is compared with the others (default: 1,2)")
    option("--batches", type=some, default=8, help="of each epoch and loader (default: 8)")
    option(
        "--device",
        default="",
        choices=["cpu"],
        help="run a script that is written for GPUs on CPU processes",
    )
    option(
        "--strict",
        action="store_true",
        help="what is printed, written or only wasteful makes it different, too",
    )
    option("--without", default="", help=f"switch off: {', '.join(BY_NATURE)}")
    option("--python", default=sys.executable, help="the interpreter of your environment; it needs PyTorch")
    option("--timeout", type=some, default=120, help="seconds without a step or batch (default: 120)")
    option("--json", default="", help="also write the verdict to this file")
    option(
        "--resume", action="store_true", help="stop the script twice and start it again: does it resume?"
    )
    option("script", nargs=argparse.REMAINDER, metavar="-- train.py ARGS", help="run as torchrun would")


def main(args) -> int:
    """Run the script, print the verdict; return 0 for the same training, 1 for another, 3 if nothing can be said."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    if vars(parser.parse_args([])).items() <= vars(args).items():  # nothing was given
        print(BEGIN)
        return 0
    verdicts, record = run(args)
    for verdict in verdicts:
        show(verdict)
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=2) + "\n")
    return VERDICTS[record["verdict"]]["status"]


def run(args) -> tuple:
    """Run the script; return the verdict on each larger world, and what --json writes of them."""
    counts = checked(args)
    with Watcher(args) as watcher:
        verdicts = (
            [resume.verdict(watcher, counts[-1], counts[0])]
            if args.resume
            else verdicts_of(watcher, counts)
        )
    kind = next(kind for kind in VERDICTS if any(verdict["verdict"] == kind for verdict in verdicts))
    lists = ("findings", "harmless")
    worlds = [
        verdict | {name: [f.record() for f in verdict[name]] for name in lists} for verdict in verdicts
    ]
    versions = {"mpdemo": __version__} | watcher.versions
    record = {"format": FORMAT, "versions": versions, "script": args.script}
    return verdicts, record | {"verdict": kind, "worlds": worlds}


def arguments(script, args, options) -> argparse.Namespace:
    """Return the command's options for a script, as a call from Python gives them."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found = parser.parse_args(["--", str(script), *map(str, args)])
    known = [name for name in vars(found) if name not in ("script", "json")]
    if unknown := sorted(options.keys() - set(known)):
        raise UserError(
            f"no option {unknown[0]!r}; allowed: {', '.join(known)}{did_you_mean(unknown[0], known)}"
        )
    vars(found).update(options)
    return found


def checked(args) -> list:
    """Refuse bad input before a process starts; return the numbers of processes."""
    args.script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not args.script:
        raise UserError("no script given; write it after --, such as: mpdemo same -- train.py --epochs 2")
    if not Path(args.script[0]).is_file():
        raise UserError(f"script {args.script[0]!r} is no file; give the path of a Python script")
    words = args.processes.split(",")
    if (
        not all(re.fullmatch(r" *0*[1-9][0-9]{0,8} *", word) for word in words)
        or len(words) < 2
        and not args.resume
    ):
        raise UserError(
            f"--processes {args.processes!r} is not allowed; allowed: two numbers or more, such as 1,2"
        )
    counts = [int(word) for word in words]
    gpus = not args.device and gpus_here()
    if max(counts) > (here := gpus or cores_here()):
        what = "GPU(s); give --device cpu, or" if gpus else "core(s); set MPDEMO_CORES, or give"
        raise UserError(f"--processes {args.processes}: this machine has {here} {what} {here} or less")
    if not shutil.which(args.python):
        raise UserError(f"--python {args.python}: no such program; give the path of a Python with PyTorch")
    args.python = os.path.abspath(shutil.which(args.python))
    args.without = set(args.without.split(",")) - {""}
    if unknown := sorted(args.without - set(BY_NATURE)):
        raise UserError(f"--without {unknown[0]!r} is not allowed; allowed: {', '.join(BY_NATURE)}")
    if args.json:
        with foreign.faults(f"--json {args.json!r} can't be written"):
            foreign.try_to_write(Path(args.json))
    return counts


def show(verdict):
    rows = [[name, *values] for name, values in verdict["table"].items()]
    print(tabulate(rows[1:], headers=rows[0], disable_numparse=True))
    head, *more = told(verdict)
    print("\n" + coloured(head, VERDICTS[verdict["verdict"]]["colour"]))
    print(wrapped("\n".join([*more, ""])))


def told(verdict) -> list:
    """Return what is said of a verdict, the verdict first, and behind what was found where the course explains it."""
    lines = [*verdict["findings"]]
    pages = [f"{TABLE[f.name]['page']} ({TABLE[f.name]['code']})" for f in lines + verdict["harmless"]]
    if verdict["harmless"]:
        lines += [
            "  Besides, without a change of the training:" if lines else "  The training is the same, but:"
        ]
        lines += verdict["harmless"]
    if pages:
        lines.append(f"  Explained in the course mpdemo: {'; '.join(pages)}")
    lines += [f"  {note}" for note in verdict["notes"]]
    return [f"{verdict['processes']} processes: {verdict['verdict']}", *map(str, lines)]

"""``python -m mpdemo bench``: the speed figures of the README, as ratios from interleaved runs in one call.

Each comparison stands beside its bound: the training loop beside a bare loop; DDP beside independent processes;
pipelines beside naive model parallelism and their own simulation; the planner's choice beside the best of all choices;
step times beside those that were predicted.
Run it on an idle machine.
"""

import json
import os
import tempfile
from pathlib import Path

from tabulate import tabulate

from mpdemo.bench import readme
from mpdemo.errors import UserError
from mpdemo.world.gpus import gpus_here, too_few_gpus
from mpdemo.world.launch import start
from mpdemo.world.machine import take_devices
from mpdemo.world.processes import check_room

PROCESSES = dict(loop=1, ddp=2, pipeline=2, hybrid=4, planner=2, memory=2, step_times=2, lightning=1)  # of each part
PARTS = tuple(PROCESSES)


def add_arguments(parser):
    """Add the options of ``bench``."""
    parser.add_argument("--out", default="runs/bench", metavar="DIR", help="where the results go")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often every variant is run in turn")
    parser.add_argument("--readme", metavar="FILE", help="write the figures into this file, between its two marks")
    parser.add_argument("--only", metavar="A,B", help=f"parts to run (default: {','.join(PARTS)})")


def main(args) -> int:
    """Run the parts one after the other; print and save one table each."""
    parts = args.only.split(",") if args.only else PARTS
    if args.rounds < 3 or not set(parts) <= set(PARTS):
        allowed = f"allowed parts {', '.join(PARTS)}; 3 rounds or more"
        raise UserError(f"--only {args.only} --rounds {args.rounds}: {allowed}")
    if args.readme and args.only:
        raise UserError(f"--readme {args.readme} wants figures of one call, not of --only {args.only}; drop one")
    if args.readme:
        readme.around(args.readme)  # refuse a file without marks before half an hour is spent
    check_room(2)
    out = Path(args.out)
    machine = take_devices(2) | {"rounds": args.rounds}
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.strerror}; name another folder") from None
    print(f"A device here is {machine['device']}.")
    possible = [part for part in parts if not too_few_gpus(PROCESSES[part])]
    for part in parts:
        if part not in possible:
            print(f"{part} is left out: {PROCESSES[part]} processes for {gpus_here()} GPUs")
        elif status := measure(part, out, args.rounds):
            return status
    if args.readme:
        readme.update(args.readme, out, possible)
    return 0


def measure(part, out, rounds) -> int:
    """Run one part and print its table; return the exit status of its processes."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-bench-") as folder:
        os.environ["TMPDIR"] = folder  # where the processes make theirs: a killed one cannot remove it
        status = start(["-m", "mpdemo.bench.parts", part, str(out), str(rounds)], PROCESSES[part])
    if status:
        return status
    rows = json.loads((out / f"{part}.json").read_text())
    texts = [
        {key: "-".join(f"{x:.4g}" for x in v) if isinstance(v, list) else v for key, v in row.items()} for row in rows
    ]
    print(tabulate(texts, headers="keys", floatfmt=".4g"), flush=True)
    return 0

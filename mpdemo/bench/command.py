"""``python -m mpdemo bench``: the speed figures of the README, as ratios from interleaved runs in one call.

Each comparison stands beside what bounds it: the training loop against a bare loop; DDP against processes that need
not talk; pipelines against naive model parallelism and their own simulation; the planner's choice against the best of
all choices. Run it on an idle machine.
"""

import json
import sys
from pathlib import Path

from mpdemo import demo
from mpdemo.bench import readme
from mpdemo.errors import UserError
from mpdemo.world.launch import start

PARTS = ("loop", "ddp", "pipeline", "planner")


def add_arguments(parser):
    """Add the options of ``bench``."""
    parser.add_argument("--out", default="runs/bench", metavar="DIR", help="where the results go")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often every variant is run in turn")
    parser.add_argument("--readme", metavar="FILE", help="write the figures into this file, between its two marks")
    parser.add_argument("--only", metavar="A,B", help=f"parts to run (default: {','.join(PARTS)})")


def main(args) -> int:
    """Run the parts one after the other; print and save a table each."""
    parts = args.only.split(",") if args.only else PARTS
    unknown = [part for part in parts if part not in PARTS]
    if unknown or args.rounds < 3:
        raise UserError(
            f"--only {args.only} --rounds {args.rounds}: allowed parts {', '.join(PARTS)}; 3 rounds or more"
        )
    if args.readme and args.only:
        raise UserError(
            f"--readme {args.readme} wants figures of one call, --only {args.only} leaves some out; drop one"
        )
    if args.readme:
        readme.around(args.readme)  # said before half an hour is spent
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    machine = demo.describe(2) | {"rounds": args.rounds}
    (out / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")
    for part in parts:
        processes = 1 if part == "loop" else 2
        if status := start(["-m", "mpdemo.bench.parts", part, str(out), str(args.rounds)], processes):
            return status
        print(table(json.loads((out / f"{part}.json").read_text())), flush=True)
    if args.readme:
        readme.update(args.readme, out)
    return 0


def table(rows) -> str:
    """Rows of equal keys as text; the quartiles stand behind the value they belong to."""
    if not rows:
        return "(nothing measured)"
    columns = list(rows[0])
    cells = [[_cell(row[c]) for c in columns] for row in rows]
    widths = [max(len(x) for x in column) for column in zip(columns, *cells, strict=True)]
    return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)) for line in [columns, *cells])


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return "-".join(_cell(v) for v in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit("start it with: python -m mpdemo bench")

"""The course's speed figures, each beside its upper bound: what `make bench` prints.

    python tests/bench/bench.py                  all of it
    python tests/bench/bench.py --only ddp       a part

Every figure is a median of paired ratios (mpdemo/measure/paired.py) from runs that alternate in one call: strategies
beside the single device. What is planned of memory stands beside what is counted. The machine should be idle. The
tables of tests/bench/README.md come from it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from cases import COUNTS, NAIVE
from cases import PROCESSES as OF_STRATEGIES
from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.measure.paired import ROUNDS, from_row, speed_texts
from mpdemo.options import Parser
from mpdemo.world.devices import gpus_here, take_devices, too_few_gpus
from mpdemo.world.processes import check_room, child_environment, end

PROMISED = "5 %, stages in bf16 7 %"
ERRORS = "prediction", "error", "promised"
PROCESSES = OF_STRATEGIES | {"plan": 2}  # of each part
SPEEDS = "comparison", "measured", "upper bound", "fraction of the upper bound"  # headings of a table


def main() -> int:
    """Run the parts one after the other; print the tables, and save them with all numbers in bench.json."""
    parser = Parser(description="Measure the course's speed figures, each beside its limit.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="where the results go"
    )
    parser.add_argument("--only", action="append", choices=PROCESSES, help="a part to run (default: all)")
    args = parser.parse_args()
    try:
        check_room(2)
        return run_parts(args.only or PROCESSES, args.out)
    except UserError as error:
        parser.error(str(error))


def run_parts(parts, out) -> int:
    """Run some parts and print what they measured; return the exit status of the first that failed, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    report, tables = {"machine": take_devices(2) | {"rounds": ROUNDS}, "results": {}}, {}
    print(f"A device here is {report['machine']['device']}.")
    for part in parts:
        if too_few_gpus(PROCESSES[part]):
            print(f"{part} is left out: {PROCESSES[part]} processes for {gpus_here()} GPUs")
            continue
        if status := run(part, out / part):
            return status
        result = report["results"][part] = json.loads((out / part / "summary.json").read_text())
        for headings, *line in (plan if part == "plan" else strategies)(result):
            tables.setdefault(headings, []).append(line)
        (out / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    for headings, lines in tables.items():
        print(tabulate(lines, headings, "github", disable_numparse=True), end="\n\n")
    return 0


def run(part, folder) -> int:
    """Run one part in its processes; return their exit status."""
    name, words = ("planned.py", []) if part == "plan" else ("cases.py", [part])
    command = [str(Path(__file__).with_name(name)), *words, str(folder)]
    with tempfile.TemporaryDirectory(prefix="mpdemo-bench-") as scratch:
        os.environ["TMPDIR"] = scratch  # where the processes make theirs: a killed one cannot remove it
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES[part]}"]
        environment = child_environment() | {"OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, *launch, *command], env=environment).returncode


def strategies(result) -> list:
    """Return the lines of strategies beside the single device, and of pipelines beside the unpipelined split model.

    Each line, here and below, begins with the headings of its table.
    """
    rows = [row for row in result["rows"] if row["variant"] not in ("single", NAIVE)]
    name = "{variant}; {model}, {image_size} px, batch {batch_size}: speed-up".format
    lines = [(SPEEDS, name(**row), *speed_texts(row)) for row in rows if "over_naive" not in row]
    pipelines = [row for row in rows if "over_naive" in row]
    for model in dict.fromkeys(row["model"] for row in pipelines):
        lines += over_naive([row for row in pipelines if row["model"] == model])
    return lines


def over_naive(rows) -> list:
    """Return the lines of a model's pipelines: one for each schedule, a column for each number of microbatches."""
    name = "{model}, {image_size} px, batch {batch_size}: speed-up over naive, fraction of the upper bound".format
    headings = name(**rows[0]), *(f"{count} microbatches" for count in COUNTS)
    lines = {row["schedule"]: [headings, row["schedule"]] for row in rows}
    for row in rows:
        lines[row["schedule"]].append(f"{from_row(row, 'over_naive')}, {row['fraction_of_bound']:.2f}")
    paper = (
        headings,
        "on paper: GPipe and 1F1B, equal stages, 2M/(M+1)",
        *(f"{2 * m / (m + 1):.2f}" for m in COUNTS),
    )
    return [*lines.values(), paper]


def plan(result) -> list:
    """Return the lines of planned memory and messages."""
    rows = result["rows"]
    off = [abs(row["planned"]["peak"] / row["counted"]["peak"] - 1) for row in rows]
    sent = [[sum(row[kind]["sent"].values()) for kind in ("planned", "counted")] for row in rows]
    equal = [abs(planned - counted) < 0.001 * counted for planned, counted in sent if counted]
    runs = f"{len(rows)} peaks of steps of a Llama in one and in two processes"
    return [
        (
            ERRORS,
            f"{runs}: median and largest error",
            f"{100 * median(off):.1f} %, {100 * max(off):.1f} %",
            PROMISED,
        ),
        (ERRORS, "bytes of messages, within a thousandth", f"{sum(equal)} of {len(equal)} right", "all"),
    ]


if __name__ == "__main__":
    end(main())

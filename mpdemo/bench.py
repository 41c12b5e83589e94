"""``python -m mpdemo bench``: the course's speed figures, each beside its limit, in one table and one JSON file.

Every figure is a ratio of medians from runs that alternate in one call: strategies beside the single device, what
`mpdemo.plan` predicts beside what is measured, training loops beside a bare one. Run it on an idle machine.
"""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.notebook.story import equal_cut
from mpdemo.schedules import SCHEDULES
from mpdemo.settings import Settings
from mpdemo.world.gpus import gpus_here, too_few_gpus
from mpdemo.world.launch import end, start
from mpdemo.world.machine import take_devices
from mpdemo.world.processes import check_room

RUNGS = {"ddp": 2, "pipeline": 2, "hybrid": 4}  # parts that compare strategies -> their processes
LABS = {"memory": ("predictions", 2), "step_times": ("step_times", 2), "loop": ("lightning_overhead", 1)}
PROCESSES = RUNGS | {part: processes for part, (_, processes) in LABS.items()}


def add_arguments(parser):
    """Add the options of ``bench``."""
    parser.add_argument("--out", default="runs/bench", metavar="DIR", help="where the results go")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often each variant is timed")
    parser.add_argument("--only", metavar="A,B", help=f"parts to run (default: {','.join(PROCESSES)})")


def main(args) -> int:
    """Run the parts one after the other; print one table, and save it with all numbers in bench.json."""
    parts, out = args.only.split(",") if args.only else list(PROCESSES), Path(args.out)
    if args.rounds < 3 or not set(parts) <= set(PROCESSES):
        allowed = f"allowed parts {', '.join(PROCESSES)}; 3 rounds or more"
        raise UserError(f"--only {args.only} --rounds {args.rounds}: {allowed}")
    check_room(2)
    report = {"machine": take_devices(2) | {"rounds": args.rounds}, "rows": []}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.strerror}; name another folder") from None
    print(f"A device here is {report['machine']['device']}.")
    for part in parts:
        if too_few_gpus(PROCESSES[part]):
            print(f"{part} is left out: {PROCESSES[part]} processes for {gpus_here()} GPUs")
        elif status := run(part, out / part, args.rounds):
            return status
        else:
            result = json.loads((out / part / "summary.json").read_text())
            report["rows"] += FIGURES.get(part, strategies)(result)
            (out / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    table = [[row["what"], row["measured"], row.get("limit", ""), row.get("share", "")] for row in report["rows"]]
    print(tabulate(table, ["comparison", "measured", "limit", "share of the limit"], "github", disable_numparse=True))
    return 0


def run(part, folder, rounds) -> int:
    """Run one part in its processes; return their exit status."""
    command = ["-m", "mpdemo.bench", part, str(folder), str(rounds)]
    if part in LABS:
        rounds = {"memory": [], "step_times": [str(rounds)], "loop": [str(10 * rounds)]}[part]
        command = ["-m", f"mpdemo.labs.{LABS[part][0]}", str(folder), *rounds]
    with tempfile.TemporaryDirectory(prefix="mpdemo-bench-") as scratch:
        os.environ["TMPDIR"] = scratch  # where the processes make theirs: a killed one cannot remove it
        return start(command, PROCESSES[part])


def cases(part) -> list[dict]:
    """Return the comparisons of a part: settings by name, "single" the first."""
    transformer = Settings(rung="single", model="transformer", image_size=28, batch_size=256, optimizer="adamw")
    if part == "ddp":
        resnets = [
            Settings(rung="single", model=model, image_size=size, batch_size=batch)
            for model, size, batch in (("resnet18", 64, 64), ("resnet50", 128, 32))
        ]
        rungs = {resnets[0]: ["ddp"], resnets[1]: ["ddp"], transformer: ["ddp", "fsdp", "tensor"]}
        return [{s.rung: s} | {rung: replace(s, rung=rung) for rung in more} for s, more in rungs.items()]
    equal = {name: equal_cut(2 * SCHEDULES[name].stages_per_rank) for name in SCHEDULES}
    if part == "hybrid":
        grid = replace(transformer, rung="hybrid", replicas=2, microbatches=4)
        return [{"single": transformer} | {n: replace(grid, schedule=n, cut=cut) for n, cut in equal.items()}]
    stack = Settings(rung="single", model="convstack", image_size=32, batch_size=64, norm="group")
    resnet = Settings(rung="single", model="resnet101", image_size=128, batch_size=32)
    pipeline = replace(resnet, rung="pipeline", schedule="1F1B", microbatches=8)
    usual = {f"1F1B, 8 microbatches, cut after {cut}": replace(pipeline, cut=cut) for cut in ("layer2.3", "layer3.6")}
    variants = [
        {"single": s, "naive": replace(s, rung="model_parallel", cut=equal_cut(2))}
        | {
            f"{name}, {count} microbatches": replace(s, rung="pipeline", schedule=name, microbatches=count, cut=cut)
            for count in (2, 4, 8, 16)
            for name, cut in equal.items()
        }
        for s in (stack, transformer)
    ]
    return [*variants, {"single": resnet} | usual]


def measure(part, out, rounds):
    """Run under torchrun: time all variants of each case alternately; rank 0 writes the rows."""
    from mpdemo import ladder
    from mpdemo.compare import write_result

    def rows_of(world):
        rows = []
        for variants in cases(part):
            comparison = ladder.compare(variants, world)
            comparison.run(int(rounds), title=variants["single"].model)
            measured = ladder.measured_rows(comparison, variants, errors={})
            rows += [
                {"variant": name, "model": s.model, "image_size": s.image_size, "batch_size": s.batch_size} | row
                for (name, s), row in zip(variants.items(), measured, strict=True)
            ]
        return {"rows": rows}

    write_result(out, rows_of)


def strategies(result) -> list[dict]:
    """Return the table's rows of strategies beside the single device."""
    return [
        {
            "what": "{model}, {image_size} px, batch {batch_size}: {variant}, {processes} processes".format(**row),
            "measured": spread(row["speedup"], row["speedup_quartiles"]) + " times one device",
            "limit": "the same, within the noise" if row["at_bound"] else f"{row['bound']:.2f}",
            "share": spread(row["fraction_of_bound"], row["fraction_quartiles"]),
            **row,
        }
        for row in result["rows"]
        if row["variant"] != "single"
    ]


def spread(value, quartiles) -> str:
    """Write a number and the quartiles of the rounds."""
    return f"{value:.2f} [{quartiles[0]:.2f}-{quartiles[1]:.2f}]"


def memory(result) -> list[dict]:
    """Return the table's rows of predicted memory and messages."""
    rows = result["rows"]
    off = [max(abs(p / c - 1) for p, c in zip(r["predicted"], r["counted"], strict=True)) for r in rows]
    equal = sum(row["messages"] == row["predicted_messages"] for row in rows)
    what, measured = f"peak memory of {len(rows)} runs: off by", f"median {median(off):.1%}, largest {max(off):.1%}"
    messages = {"what": "their messages, equal to the byte", "measured": f"{equal} of {len(rows)}", "limit": "all"}
    return [{"what": what, "measured": measured, "limit": "5 %", "off": off}, messages]


def step_times(result) -> list[dict]:
    """Return the table's row of predicted step times."""
    off = [abs(row["ratio"] - 1) for row in result["rows"] if not row["case"].startswith("--rung single")]
    measured = f"median {median(off):.0%}, largest {max(off):.0%}"
    return [{"what": f"step time of {len(off)} runs: off by", "measured": measured, "limit": "10 %", "off": off}]


def loop(result) -> list[dict]:
    """Return the table's rows of what a training loop adds to a step."""
    story = result["story_seconds"]
    return [
        {
            "what": f"{name}: adds to a step, over a bare loop",
            "measured": f"{seconds * 1e6:.0f} µs, {seconds / story:.1%} of a step of the course model",
            "seconds": seconds,
        }
        for name, seconds in result["added_seconds"].items()
    ]


FIGURES = {"memory": memory, "step_times": step_times, "loop": loop}  # the other parts: `strategies`

if __name__ == "__main__":
    import sys

    end(measure(*sys.argv[1:]))

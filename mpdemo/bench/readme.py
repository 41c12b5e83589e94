"""Write the README's speed figures from what ``python -m mpdemo bench`` measured."""

import json
from itertools import combinations, groupby
from math import log
from pathlib import Path
from statistics import median

from mpdemo.errors import UserError

START, END = "<!-- bench -->", "<!-- /bench -->"
CLOSE = 0.1  # how far a predicted step time may be off
TIE = 0.03  # trainings whose steps differ by less are equally fast
RUNGS = {"ddp": "DDP", "fsdp": "FSDP", "tensor": "tensor parallel"}


def around(readme) -> tuple[str, str]:
    """Return what stands before and after the two marks of a Markdown file.

    Raises
    ------
    UserError
        No such file, or no marks in it.
    """
    text = Path(readme).read_text(encoding="utf-8") if Path(readme).is_file() else ""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise UserError(
            f"--readme {readme}: allowed is a file with the lines {START} and {END}; the figures go between them"
        )
    return before, after


def update(readme, folder, parts):
    """Write the figures of the parts that were measured, read from `folder`, between the marks of a Markdown file."""
    before, after = around(readme)
    results = {name: json.loads(Path(folder, f"{name}.json").read_text()) for name in ("machine", *parts)}
    Path(readme).write_text(f"{before}{START}\n{markdown(results)}{END}{after}", encoding="utf-8")


def markdown(results) -> str:
    """Return the whole section."""
    lines = [*_machine(results["machine"]), *_comparisons(results), *_pipelines(results["pipeline"])]
    return "".join(f"{line}\n" for line in lines)


def _machine(machine):
    where = "two CPU cores without a GPU, one process per core" if "CPU core" in machine["device"] else "two GPUs"
    version = machine["torch"].split("+")[0]
    yield f"Measured on {machine['date']} by `make bench`: torch {version} on {machine['processor']}, {where}."
    yield f"Times in a row are of one call: medians over {machine['rounds']} interleaved rounds, and ratios of these"
    yield "medians; in brackets the quartiles of the ratio in each round."
    yield ""


def _comparisons(results):
    yield "| comparison | measured | bound | share of the bound |"
    yield "|---|---|---|---|"
    for row in results["ddp"]:
        yield (
            f"| {RUNGS[row['rung']]}, 2 processes, {row['model']}, {row['image_size']} px, batch {row['batch']}: "
            "speed-up over one "
            f"| {_spread(row['speedup'], row['speedup_quartiles'])} | {row['bound']:.2f}, two independent processes "
            f"| {_spread(row['fraction_of_bound'], row['fraction_quartiles'])} |"
        )
    toy, convnet = results["loop"]
    yield (
        f"| training loop: time it adds to a step, {toy['added_seconds'] * 1e6:.0f} µs, over a bare ConvNet step "
        f"| {100 * convnet['added_share']:.1f} % | 2 % | |"
    )
    for row in results.get("lightning", []):
        ours, lightning = (f"{row[name] * 1e6:.0f} µs" for name in ("ours", "lightning"))
        yield (
            f"| PyTorch Lightning, without logger and checkpoints: time it adds to a step (our loop: {ours}), of a "
            f"step of the story {100 * row['lightning'] / row['story']:.1f} % | {lightning} | | |"
        )
    yield from _hybrid(results.get("hybrid", []))  # none on a machine with fewer than four GPUs
    pipelines = results["pipeline"]
    share = max(row["recorder_share"] for row in pipelines)
    yield f"| recording a timeline: share of a step, the largest of all pipelines | {100 * share:.2f} % | 1 % | |"
    usual, balanced = (_find(pipelines, "resnet101", "1f1b", cut=cut) for cut in ("layer2.3", "layer3.6"))
    yield (
        f"| ResNet-101, 128 px, batch {usual['batch']}, 1F1B, {usual['microbatches']} microbatches: cut after layer3.6 "
        f"over the usual cut after layer2 | {usual['step_seconds'] / balanced['step_seconds']:.2f} times faster | | |"
    )
    yield from _planner(results["planner"])
    off, equal = ([row[key] for row in results["memory"]] for key in ("off_by", "messages_equal"))
    yield (
        f"| memory predicted beforehand, {len(off)} trainings of the story on two processes, each device's fullest "
        f"moment: off by, the median and the largest | {median(off):.1%}, {max(off):.1%} | 5 % | |"
    )
    yield f"| their messages: trainings of which every byte was predicted | {sum(equal)} of {len(equal)} | all | |"
    yield from _step_times(results["step_times"])
    yield ""


def _hybrid(rows):
    for batch, of_batch in groupby(rows, key=lambda row: row["batch"]):
        of_batch = list(of_batch)
        fastest, shares = max(of_batch, key=lambda row: row["speedup"]), [row["fraction_of_bound"] for row in of_batch]
        yield (
            f"| hybrid, 2 replicas of a pipeline over 2 processes, {fastest['model']}, batch {batch}: speed-up "
            f"of the fastest schedule ({fastest['schedule']}) over one; share, of all schedules "
            f"| {_spread(fastest['speedup'], fastest['speedup_quartiles'])} "
            f"| the simulation, on as many cores | {min(shares):.2f}-{max(shares):.2f} |"
        )


def _planner(rows):
    planned, *others = rows
    best = max(others, key=lambda row: row["speedup"])
    yield (
        f"| planner's choice for {planned['model']} ({planned['schedule']}, {planned['microbatches']} microbatches): "
        f"time over the fastest of {planned['of'] - 1} others ({best['schedule']}, {best['microbatches']}) "
        f"| {_spread(best['speedup'], best['speedup_quartiles'])} | 1 | |"
    )
    off = sorted(abs(row["planned_seconds"] / row["step_seconds"] - 1) for row in rows)
    yield (
        f"| step times of this choice and the {len(off) - 1} fastest others, predicted once beforehand: off by, the "
        f"median and the largest | {median(off):.0%}, {off[-1]:.0%} | 10 % | |"
    )


def _step_times(rows):
    several = [row for row in rows if not row["case"].startswith("--rung single")]
    off = sorted(abs(row["ratio"] - 1) for row in several)
    single = [abs(ratio - 1) for row in several for ratio in row["ratios"]]
    close = sum(each <= CLOSE for each in single)
    yield (
        f"| step time predicted beforehand, anew in each round, {len(off)} trainings of the story on two processes: "
        f"the rounds' median is off by, the median and the largest of all trainings (of the single predictions {close} "
        f"of {len(single)} are within {CLOSE:.0%}) | {median(off):.0%}, {off[-1]:.0%} | 10 % | |"
    )
    pairs = [(a, b) for a, b in combinations(rows, 2) if abs(log(a["measured"] / b["measured"])) > log(1 + TIE)]
    right = sum((a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]) for a, b in pairs)
    first, best = (min(rows, key=lambda row: row[which]) for which in ("predicted", "measured"))
    planned = next(row for row in rows if row["recommended"])
    over, planned_over = (row["measured"] / best["measured"] for row in (first, planned))
    yield (
        f"| their order: pairs that differ by more than {TIE:.0%} and were predicted the right way round; the one that "
        f"`plan` recommends (`{planned['case']}`), and the one predicted fastest (`{first['case']}`), over the fastest "
        f"| {right} of {len(pairs)}; {planned_over:.2f}, {over:.2f} | all; 1.03 | |"
    )


def _pipelines(rows):
    yield "Pipelines on two processes: speed-up over naive model parallelism (share of the simulated schedule's speed;"
    yield "measured and predicted idle share). The simulation has the stage times of the very step it is compared with;"
    yield "what it lacks is communication, and the library's work between two operations."
    yield ""
    for model, title in (("convstack", "equal convolution blocks"), ("transformer", "equal transformer blocks")):
        measured = [row for row in rows if row["model"] == model and row["microbatches"] > 1]
        counts = sorted({row["microbatches"] for row in measured})
        yield f"| {title}, batch {measured[0]['batch']} | " + " | ".join(f"{m} microbatches" for m in counts) + " |"
        yield "|---|" + "---|" * len(counts)
        for schedule in dict.fromkeys(row["schedule"] for row in measured):
            cells = [_cell(_find(measured, model, schedule, microbatches=m)) for m in counts]
            yield f"| {schedule} | " + " | ".join(cells) + " |"
        bounds = [f"{2 * m / (m + 1):.2f}" for m in counts]
        yield "| paper: gpipe and 1f1b, equal stages, 2 M / (M + 1) | " + " | ".join(bounds) + " |"
        yield ""
    yield "A speed-up above that on paper: microbatches cost less per image than the whole batch, which naive model"
    yield "parallelism computes at once."


def _cell(row):
    idle = f"{row['measured_idle_share']:.2f}, {row['predicted_idle_share']:.2f}"
    return f"{row['speedup']:.2f} ({row['fraction_of_bound']:.2f}; {idle})"


def _spread(value, quartiles):
    return f"{value:.2f} [{quartiles[0]:.2f}-{quartiles[1]:.2f}]"


def _find(rows, model, schedule, **values):
    """Return the first row of this model and schedule with the values."""
    same = {"model": model, "schedule": schedule, **values}
    return next(row for row in rows if all(row[key] == value for key, value in same.items()))

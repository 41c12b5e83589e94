"""``mpdemo demo``: train a small vision transformer on real digits up the whole ladder; print one table.

All rungs are trained in one world of processes, alternately and one step each, on the same batches: so the training is
also the measurement. Each is the training of the command that is printed. The exit status is 1 if a rung is not the
same training as the single device's.
"""

import itertools
import json
import sys
import time
from pathlib import Path

from tabulate import tabulate

from mpdemo.errors import RunFailed, UserError, printable
from mpdemo.measure.paired import from_row
from mpdemo.settings import RUNG_FORMS, RUNGS, Settings, checked, equal_cut, recipe
from mpdemo.settings.cuts import HEADS
from mpdemo.world.devices import take_devices
from mpdemo.world.launch import end, start
from mpdemo.world.processes import check_room

GRADIENTS_EQUAL = 1e-4  # relative; float32 summed in another order differs by about 1e-6
LOSS_EQUAL = 0.01  # relative, after the whole training
STEPS = 16  # of a training run; each is a round of the measurement, but the first two are not timed
LEAST_STEPS = 3
HEADINGS = ["strategy", "form", "loss", "accuracy", "images/s", "speed-up", "upper bound", "fraction"]
HEADINGS += ["gradient diff"]
FOOT = (
    "In brackets: 95 % intervals, where 6 or more steps were timed. At the bound: the interval of the fraction doesn't "
    "lie below 1, so no shortfall from the upper bound can be reported."
)


def add_arguments(parser):
    """Add the options of ``demo``."""
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="where the report goes")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="steps of every rung's training")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="devices to spread over")
    parser.add_argument("--all", action="store_true", help="also the rungs that share every layer: fsdp, tensor")


def main(args) -> int:
    """Train, measure, report; return the exit status."""
    for name, least in (("steps", LEAST_STEPS), ("processes", 2)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)} is not allowed; allowed: {least} or more")
    check_room(args.processes)
    out, begin = Path(args.out), time.time()
    rows = settings_of_rows(args)
    out.mkdir(parents=True, exist_ok=True)
    machine = take_devices(args.processes)
    print(f"mpdemo: one training, from one device to {args.processes}. A device here is {machine['device']}.")
    print("Each row of the table is the training of one of these commands:")
    for settings in rows:
        print(printable("mpdemo train " + " ".join(settings.arguments())), flush=True)
    (out / "settings.json").write_text(json.dumps([settings.as_dict() for settings in rows]))
    if start(["-m", "mpdemo.demo", str(out)], args.processes):
        raise RunFailed("a training run failed; see its message above")
    measured = json.loads((out / "rows.json").read_text())
    report = {"machine": machine, "model": rows[0].model, "settings": rows[0].as_dict(), "rungs": measured}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("", table(measured), FOOT, *(row["note"] for row in measured if row["note"]), "", sep="\n")
    print(f"saved {printable(str(out))}/report.json ({time.time() - begin:.0f} s in all)")
    return 0 if same_training(measured) else 1


def settings_of_rows(args) -> list[Settings]:
    """Return the settings of each rung and form that so many processes can compare, in the order in which one climbs.

    A hybrid run needs two replicas of two devices, tensor parallelism heads that divide. What a row cannot do is
    refused.
    """
    n = args.processes
    left_out = {"hybrid": n < 4 or n % 2, "fsdp": not args.all, "tensor": not args.all or HEADS % n}
    rows = []
    for rung in (rung for rung in RUNGS if not left_out.get(rung)):
        for form in reversed(RUNG_FORMS[rung]):
            changes = {"form": form, "epochs": None, "lr_schedule": "constant", "timeline": False}
            if rung != "single":
                changes["processes" if form == "per-device" else "devices"] = n
            if rung == "pipeline" and form == "per-device":  # two stages per device
                changes["cut"] = equal_cut(2 * n) if n in (2, 4) else None
            rows.append(Settings(**recipe(rung, steps=args.steps, out=f"{args.out}/{rung}-{form}", **changes)))
            checked(rows[-1])
    return rows


def train_all(out):
    """Run under torchrun: train all rungs alternately, and validate each; rank 0 writes the rows."""
    from mpdemo import data
    from mpdemo.measure import compare
    from mpdemo.measure.trial import join_world
    from mpdemo.training.setup import learning_rate

    rows = [Settings(**row) for row in json.loads(Path(out, "settings.json").read_text())]
    variants, single = compare.as_variants(rows), rows[0]
    with join_world() as world:
        model, first = compare.model_and_batch(single)
        comparison = compare.compare(variants, world, model, first, single.lr)
        trials = [trial for trial in comparison.trials.values() if trial]
        rates = [learning_rate(trial.rung.optimizer, single, single.steps) for trial in trials]
        loaders = data.Loaders(data.load(single.dataset), single.batch_size, seed=single.seed)
        rounds = single.steps - compare.WARMUP
        comparison.run(rounds, title="training", batches=batches(loaders, rates))
        measured = compare.measured_rows(comparison, variants)
        for name, row in zip(variants, measured, strict=True):
            row.update(validated(comparison.trials[name], world.device))
    if world.rank == 0:
        Path(out, "rows.json").write_text(json.dumps(measured))


def batches(loaders, rates):
    """Yield the batches of the training run; after the step with each, every trial gets its next learning rate."""
    for epoch in itertools.count():
        loaders.start_epoch(epoch)
        for batch in loaders.train:
            yield batch
            for rate in rates:
                rate.step()


def validated(trial, device) -> dict:
    """Return loss and accuracy of the validation images with a trial's weights; all ranks must call this."""
    import torch

    from mpdemo.run import validation_sums
    from mpdemo.world.collectives import sum_over_ranks

    sums = torch.zeros(3, dtype=torch.double, device=device)  # of a rank that has no part in the trial
    if trial:
        sums = validation_sums(trial.rung, trial.run.loaders(trial.rung).validation, device)
    loss, correct, count = sum_over_ranks(sums).tolist()
    return {"loss": loss / count, "accuracy": correct / count}


def table(rows) -> str:
    """Return the rows as a table."""
    lines = []
    for row in rows:
        first = row["strategy"], row["form"], f"{row['loss']:.4f}", f"{row['accuracy']:.1%}"
        error = f"{row['max_relative_gradient_error']:.1e}"
        lines.append([*first, f"{row['images_per_second']:.0f}", *speed_texts(row), error])
    return tabulate(lines, HEADINGS, "plain", disable_numparse=True, colalign=["left"] * 2 + ["right"] * 7)


def speed_texts(row) -> tuple[str, str, str]:
    """Return a row's speed-up, its upper bound, and the fraction of the bound, with their 95 % intervals."""
    speed, fraction = (str(from_row(row, name)) for name in ("speedup", "fraction_of_bound"))
    return speed, f"{row['bound']:.2f}", fraction + ", at the bound" * row["at_bound"]


def same_training(rows) -> bool:
    """Say whether every rung was the same training, and return it."""
    reference = rows[0]["loss"]
    wrong = []
    for row in rows:
        equal_gradients = row["max_relative_gradient_error"] <= GRADIENTS_EQUAL
        equal_loss = abs(row["loss"] - reference) <= LOSS_EQUAL * reference
        if not (equal_gradients and equal_loss):
            wrong.append(f"{row['rung']} ({row['form']})")
    if wrong:
        print(f"mpdemo: NOT the same training: {', '.join(wrong)}", file=sys.stderr)
    else:
        print("Every rung was the same training. Now open the notebooks: make lab")
    return not wrong


if __name__ == "__main__":
    end(train_all(*sys.argv[1:]))

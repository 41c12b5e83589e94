"""``python -m mpdemo demo``: train a small vision transformer on real digits up the whole ladder; print one table.

All rungs are trained in one world of processes, alternately and one step each, on the same batches: so the training is
also the measurement. Each is the training of the command that is printed. The exit status is 1 if a rung is not the
same training as the single device's.
"""

import json
import sys
import time
from pathlib import Path

from tabulate import tabulate

from mpdemo.cuts import HEADS
from mpdemo.errors import RunFailed, UserError
from mpdemo.notebook.recipe import equal_cut, recipe
from mpdemo.paired import from_row
from mpdemo.settings import RUNG_FORMS, RUNGS, Settings, checked
from mpdemo.world.devices import take_devices
from mpdemo.world.launch import end, start
from mpdemo.world.processes import check_room

GRADIENTS_EQUAL = 1e-4  # relative; float32 summed in another order differs by about 1e-6
LOSS_EQUAL = 0.01  # relative, after the whole training
STEPS, LEAST = 16, 3  # of a training run; each is a round of the measurement, but the first two are not timed
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
    for name, least in (("steps", LEAST), ("processes", 2)):
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
        print("python -m mpdemo train " + " ".join(settings.arguments()), flush=True)
    (out / "settings.json").write_text(json.dumps([settings.as_dict() for settings in rows]))
    if start(["-m", "mpdemo.demo", str(out)], args.processes):
        raise RunFailed("a training run failed; see its message above")
    measured = json.loads((out / "rows.json").read_text())
    report = {"machine": machine, "model": rows[0].model, "settings": rows[0].as_dict(), "rungs": measured}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("", table(measured), FOOT, *(row["note"] for row in measured if row["note"]), "", sep="\n")
    print(f"saved {out}/report.json ({time.time() - begin:.0f} s in all)")
    return verdict(measured)


def settings_of_rows(args) -> list[Settings]:
    """Return the settings of each rung and form that so many processes can compare, in the order in which one climbs.

    A hybrid run needs two replicas of two devices, tensor parallelism heads that divide. What a row cannot do is
    refused.
    """
    n = args.processes
    left_out = set() if n >= 4 and n % 2 == 0 else {"hybrid"}
    left_out |= ({"tensor"} if HEADS % n else set()) if args.all else {"fsdp", "tensor"}
    climbed = [(rung, form) for rung in RUNGS if rung not in left_out for form in reversed(RUNG_FORMS[rung])]
    rows = []
    for rung, form in climbed:
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
    from mpdemo import compare, data
    from mpdemo.trial import join_world

    rows = [Settings(**row) for row in json.loads(Path(out, "settings.json").read_text())]
    variants, single = compare.as_variants(rows), rows[0]
    with join_world() as world:
        model, first = compare.model_and_batch(single)
        comparison = compare.compare(variants, world, model, first)
        dataset = data.load(single.dataset)
        comparison.run(single.steps - compare.WARMUP, title="training", batches=batches(comparison, dataset, single))
        measured = compare.measured_rows(comparison, variants)
        for name, row in zip(variants, measured, strict=True):
            row |= validated(comparison.trials[name], model, dataset)
    if world.rank == 0:
        Path(out, "rows.json").write_text(json.dumps(measured))


def batches(comparison, dataset, settings):
    """Yield the batches of the training run, and set every trial's learning rate before each."""
    from mpdemo import data

    optimizers = [trial.rung.optimizer for trial in comparison.trials.values() if trial]
    loaders, step = data.Loaders(dataset, settings.batch_size, seed=settings.seed), 0
    for epoch in range(settings.steps):
        loaders.start_epoch(epoch)
        for batch in loaders.train:
            step += 1
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = settings.lr * min(1, step / settings.warmup_steps)
            yield batch


def validated(trial, model, dataset) -> dict:
    """Return loss and accuracy of the validation images with a trial's weights; all ranks must call this."""
    import torch
    from torch.nn.functional import cross_entropy

    from mpdemo.world.collectives import gather_objects, whole

    weights = {name: whole(p.detach()) for name, p in trial.rung.model.named_parameters()} if trial else {}
    for part in gather_objects(weights):
        model.load_state_dict(part, strict=False)  # a rank of a cut model has some of them
    images, labels = dataset.validation.tensors
    with torch.no_grad():
        outputs = model(images)
    accuracy = (outputs.argmax(1) == labels).double().mean()
    return {"loss": cross_entropy(outputs, labels).item(), "accuracy": accuracy.item()}


def table(rows) -> str:
    """Return the rows as a table."""
    headings = [
        "strategy",
        "form",
        "loss",
        "accuracy",
        "images/s",
        "speed-up",
        "upper bound",
        "fraction",
        "gradient diff",
    ]
    lines = []
    for row in rows:
        first = row["strategy"], row["form"], f"{row['loss']:.4f}", f"{row['accuracy']:.1%}"
        error = f"{row['max_relative_gradient_error']:.1e}"
        lines.append([*first, f"{row['images_per_second']:.0f}", *speed_texts(row), error])
    return tabulate(lines, headings, "plain", disable_numparse=True, colalign=["left"] * 2 + ["right"] * 7)


def speed_texts(row) -> tuple[str, str, str]:
    """Return a row's speed-up, its upper bound, and the fraction of the bound, with their 95 % intervals."""
    speed, fraction = (str(from_row(row, name)) for name in ("speedup", "fraction_of_bound"))
    return speed, f"{row['bound']:.2f}", fraction + ", at the bound" * row["at_bound"]


def verdict(rows) -> int:
    """Say whether every rung was the same training; return the exit status."""
    reference = rows[0]["loss"]
    wrong = [
        f"{row['rung']} ({row['form']})"
        for row in rows
        if not row["max_relative_gradient_error"] <= GRADIENTS_EQUAL
        or not abs(row["loss"] - reference) <= LOSS_EQUAL * reference
    ]
    if wrong:
        print(f"mpdemo: NOT the same training: {', '.join(wrong)}", file=sys.stderr)
        return 1
    print("Every rung was the same training. Now open the notebooks: make lab")
    return 0


if __name__ == "__main__":
    end(train_all(*sys.argv[1:]))

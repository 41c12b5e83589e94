"""``python -m mpdemo demo``: the main job. Train on real digits up the whole ladder, then show it in one table.

Every rung is trained by the very command that is printed. Then all rungs are timed in turn in one world, and every
rung's gradients are compared with the single device's. The exit status is 1 if a rung is not the same training.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from mpdemo.errors import RunFailed, UserError
from mpdemo.notebook.ladder import table
from mpdemo.notebook.story import RECIPE, equal_cut, story
from mpdemo.settings import Settings, checked
from mpdemo.world.launch import be_killed_with_parent, start
from mpdemo.world.machine import take_devices
from mpdemo.world.processes import check_room

GRADIENTS_EQUAL = 1e-4  # relative; float32 summed in another order differs by about 1e-6
BATCH = 128  # twice the story's: a microbatch is then large enough for its work to outweigh what each one costs
LOSS_EQUAL = 0.01  # relative, after the whole training


def add_arguments(parser):
    """Add the options of ``demo``."""
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="where the report goes")
    parser.add_argument(
        "--epochs", type=int, default=RECIPE["epochs"], metavar="N", help="passes over the digits, for each rung"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="stop every rung after so many steps: a quick look")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="devices to spread over")
    parser.add_argument("--oversubscribe", action="store_true", help="start more processes than there are cores")
    parser.add_argument("--all", action="store_true", help="also the rungs that share every layer: fsdp, tensor")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often every rung is timed in turn")


def main(args) -> int:
    """Train, measure, report; return the exit status."""
    for name, least in (("epochs", 1), ("steps", 1), ("processes", 2), ("rounds", 3)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)} is not allowed; allowed: {least} or more")
    check_room(args.processes, args.oversubscribe)
    settings, out = base_settings(args), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    begin, machine = time.time(), take_devices(args.processes)
    print(f"mpdemo: one training, from one device to {args.processes}. A device here is {machine['device']}.")
    trained = train_all(settings, args.processes, args.all, out)
    rows = measure(settings, args.processes, args.rounds, args.all, out)
    for row in rows:
        row |= trained[row["rung"], row["form"]]
    write_report(out, machine, settings, rows)
    print("\n" + table(rows))
    print(f"\nsaved {out / 'report.json'} and {out / 'ladder.png'} ({time.time() - begin:.0f} s in all)")
    return verdict(rows)


def base_settings(args):
    """The settings that all rows share: the story's, with its pipeline; refuses what one of the rows cannot do."""
    from mpdemo.labs.ladder import row_settings, rows_of_ladder

    cut = equal_cut(2 * args.processes) if args.processes in (2, 4) else None  # the pipeline has two stages per device
    changes = {"batch_size": BATCH, "epochs": args.epochs, "steps": args.steps, "cut": cut, "timeline": False}
    settings = Settings(**story("pipeline", **changes), oversubscribe=args.oversubscribe)
    for rung, form in rows_of_ladder(args.processes, args.all):
        checked(row_settings(settings, rung, form, args.processes))
    return settings


def train_all(settings, processes, sharded, out) -> dict:
    """Train every rung and form by its own command; return loss and accuracy by (rung, form)."""
    from mpdemo.labs.ladder import row_settings, rows_of_ladder

    results = {}
    for rung, form in rows_of_ladder(processes, sharded):
        run = replace(row_settings(settings, rung, form, processes), out=str(out / f"{rung}-{form}"))
        command = ["-m", "mpdemo", "train", *run.arguments()]
        print("\npython " + " ".join(command), flush=True)
        status = subprocess.run([sys.executable, *command], preexec_fn=be_killed_with_parent).returncode
        if status:
            raise RunFailed(f"the command above ended with exit status {status}; see its message above")
        summary = json.loads(Path(run.out, "summary.json").read_text())
        results[rung, form] = {"loss": summary["validation_loss"], "accuracy": summary["validation_accuracy"]}
    return results


def measure(settings, processes, rounds, sharded, out) -> list[dict]:
    """Time all rungs against each other and compare their gradients, in one world."""
    print("\ntiming all rungs in turn", flush=True)
    (out / "settings.json").write_text(json.dumps(settings.as_dict()))
    files = [str(out / "settings.json"), str(out / "rows.json")]
    more = ["sharded"] if sharded else []
    if start(["-m", "mpdemo.labs.ladder", *files, str(rounds), *more], processes):
        raise RunFailed("the measurement failed; see its message above")
    return json.loads((out / "rows.json").read_text())


def write_report(out, machine, settings, rows):
    """Write report.json and the picture."""
    from mpdemo.notebook import plots

    report = {"machine": machine, "model": settings.model, "settings": settings.as_dict(), "rungs": rows}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plots.ladder(rows).save(out / "ladder.png")


def verdict(rows) -> int:
    """Say whether every rung was the same training; return the exit status."""
    reference = rows[0]["loss"]
    wrong = [
        f"{r['rung']} ({r['form']})"
        for r in rows
        if not r["max_relative_gradient_error"] <= GRADIENTS_EQUAL
        or not abs(r["loss"] - reference) <= LOSS_EQUAL * reference
    ]
    if wrong:
        print(f"mpdemo: NOT the same training: {', '.join(wrong)}", file=sys.stderr)
        return 1
    print("Every rung was the same training. Now open the notebooks: make lab")
    return 0

"""``python -m mpdemo demo``: the main job. Train on real digits up the whole ladder, then show it in one table.

Every rung is trained by the very command that is printed. Then all rungs are timed in turn in one world, and every
rung's gradients are compared with the single device's. The exit status is 1 if a rung is not the same training.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.settings import Settings
from mpdemo.world.launch import start

GRADIENTS_EQUAL = 1e-4  # relative; float32 summed in another order differs by about 1e-6
LOSS_EQUAL = 0.01  # relative, after the whole training


def add_arguments(parser):
    """Add the options of ``demo``."""
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="where the report goes")
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="passes over the digits, for each rung")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="devices to spread over")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="how often every rung is timed in turn")


def main(args) -> int:
    """Train, measure, report; return the exit status."""
    for name, least in (("epochs", 1), ("processes", 2), ("rounds", 3)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)} is not allowed; allowed: {least} or more")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        model="convnet", norm="group", batch_size=128, epochs=args.epochs, microbatches=8, schedule="1f1b", cut="layer1"
    )
    begin, machine = time.time(), describe(args.processes)
    print(f"mpdemo: one training, from one device to {args.processes}. A device here is {machine['device']}.")
    trained = train_all(settings, args.processes, out)
    rows = measure(settings, args.processes, args.rounds, out)
    for row in rows:
        row |= trained[row["rung"], row["form"]]
    write_report(out, machine, settings, rows)
    print("\n" + table(rows))
    print(f"\nsaved {out / 'report.json'} and {out / 'ladder.png'} ({time.time() - begin:.0f} s in all)")
    return verdict(rows)


def describe(processes) -> dict:
    """What this runs on; without a GPU for every process, the CPU is used, a core a device."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < processes:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = torch.cuda.get_device_name() if gpus >= processes else "one CPU core (one process, one thread)"
    return {
        "device": device,
        "cores": os.cpu_count(),
        "processor": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def train_all(settings, processes, out) -> dict:
    """Train every rung and form by its own command; return loss and accuracy by (rung, form)."""
    from mpdemo.labs.ladder import row_settings, rows_of_ladder

    results = {}
    for rung, form in rows_of_ladder():
        run = row_settings(settings, rung, form, processes)
        run.out = str(out / f"{rung}-{form}")
        command = ["-m", "mpdemo", "train", *run.arguments()]
        print("\npython " + " ".join(command), flush=True)
        status = subprocess.run([sys.executable, *command]).returncode
        if status:
            raise UserError(f"the command above ended with exit status {status}; its message stands above this line")
        summary = json.loads(Path(run.out, "summary.json").read_text())
        results[rung, form] = {"loss": summary["validation_loss"], "accuracy": summary["validation_accuracy"]}
    return results


def measure(settings, processes, rounds, out) -> list[dict]:
    """Time all rungs against each other and compare their gradients, in one world."""
    print("\ntiming all rungs in turn", flush=True)
    (out / "settings.json").write_text(json.dumps(settings.as_dict()))
    files = [str(out / "settings.json"), str(out / "rows.json")]
    if start(["-m", "mpdemo.labs.ladder", *files, str(rounds)], processes):
        raise UserError("the measurement failed; its message stands above this line")
    return json.loads((out / "rows.json").read_text())


def write_report(out, machine, settings, rows):
    """Write report.json and the picture."""
    from mpdemo.notebook import plots

    report = {"machine": machine, "model": settings.model, "settings": settings.as_dict(), "rungs": rows}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plots.ladder(rows).save(out / "ladder.png")


def table(rows) -> str:
    """The rows as text."""
    lines = [
        f"{'rung':<15}{'form':<13}{'processes':>9}{'images/s':>10}{'speed-up':>10}{'bound':>7}{'share':>7}"
        f"{'gradient diff':>15}{'loss':>8}{'accuracy':>10}"
    ]
    for r in rows:
        lines.append(
            f"{r['rung']:<15}{r['form']:<13}{r['processes']:>9}{r['images_per_second']:>10.0f}{r['speedup']:>10.2f}"
            f"{r['bound']:>7.2f}{r['fraction_of_bound']:>7.0%}{r['max_relative_gradient_error']:>15.1e}"
            f"{r['loss']:>8.4f}{r['accuracy']:>10.1%}"
        )
    return "\n".join(lines)


def verdict(rows) -> int:
    """Say whether every rung was the same training; return the exit status."""
    wanted = rows[0]["loss"]
    wrong = [
        f"{r['rung']} ({r['form']})"
        for r in rows
        if not r["max_relative_gradient_error"] <= GRADIENTS_EQUAL or not abs(r["loss"] - wanted) <= LOSS_EQUAL * wanted
    ]
    if wrong:
        print(f"mpdemo: NOT the same training: {', '.join(wrong)}", file=sys.stderr)
        return 1
    print("Every rung was the same training. Now open the notebooks: make lab")
    return 0

"""``mpdemo demo``: train a small vision transformer with every strategy, and print the ladder as one table.

All strategies are trained in one world of processes, alternately and one step each, on the same batch: so the training
is also the measurement. The exit status is 1 if one is not the same training as the single device's.
"""

import os
import sys
from importlib.util import find_spec

from tabulate import tabulate

from mpdemo.options import count
from mpdemo.settings import RUNGS, Settings, checked, is_per_device
from mpdemo.settings.cuts import HEADS
from mpdemo.world.devices import ON_THE_CPU, too_few_gpus
from mpdemo.world.processes import check_room, child_environment, end

GRADIENTS_EQUAL = 1e-4  # relative; float32 summed in another order differs by about 1e-6
LOSS_EQUAL = 0.01  # relative, after the whole training
HEADINGS = (
    "strategy",
    "loss",
    "images/s",
    "speed-up",
    "upper bound",
    "fraction of bound",
    "gradient difference",
)
FOOT = (
    "In brackets: 95 % intervals, where 6 or more steps were timed. At the bound: the interval of the fraction doesn't "
    "lie below 1, so no shortfall from the upper bound can be reported."
)


def add_arguments(parser):
    """Add the options of ``demo``."""
    parser.add_argument(
        "--processes", type=count(2, 64), default=2, metavar="N", help="devices to spread over"
    )
    parser.add_argument(
        "--steps", type=count(1, 10_000), default=9, metavar="N", help="steps that are timed"
    )


def main(args):
    """Check what each strategy needs, then become the torchrun whose processes measure: `ladder` in each of them."""
    if not find_spec("torch"):
        raise ModuleNotFoundError("no PyTorch", name="torch")
    check_room(args.processes)
    for settings in variants(args.processes).values():
        checked(settings, args.processes if is_per_device(settings) else None)
    environment = (
        child_environment()
        | {"OMP_NUM_THREADS": "1"}
        | (ON_THE_CPU if too_few_gpus(args.processes) else {})
    )
    launch = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"
    os.execve(sys.executable, [sys.executable, *launch, "-m", "mpdemo.demo", str(args.steps)], environment)


def variants(n) -> dict:
    """Return the settings of each strategy that `n` processes can run: a hybrid needs two replicas of two devices."""
    left_out = {"hybrid": n < 4 or n % 2, "tensor": HEADS % n}
    return {rung: Settings(rung=rung, devices=n) for rung in RUNGS if not left_out.get(rung)}


def ladder(steps) -> int:
    """Run under torchrun: train and time all strategies; rank 0 prints the table. Return the exit status."""
    from mpdemo.measure import compare
    from mpdemo.world.env import join_world

    with join_world() as world:
        settings = variants(world.world_size)
        given = *compare.model_and_batch(settings["single"]), settings["single"].lr
        comparison = compare.compare(settings, world, *given)
        comparison.run(steps, title="training")
        rows = compare.measured_rows(comparison, settings)
        rows = [row | {"loss": comparison.loss(row["rung"])} for row in rows]
    if world.rank > 0:
        return 0
    print(table(rows), FOOT, *(row["note"] for row in rows if row["note"]), sep="\n")
    if wrong := [row["strategy"] for row in rows if not same_training(row, rows[0])]:
        print(f"NOT the same training: {', '.join(wrong)}")
        return 1
    print("Every strategy was the same training. Now open the notebooks: make lab")
    return 0


def table(rows) -> str:
    """Return the rows as a table."""
    from mpdemo.measure.paired import speed_texts  # it needs NumPy

    lines = []
    for row in rows:
        learnt = row["strategy"], f"{row['loss']:.4f}", f"{row['images_per_second']:.0f}"
        lines.append([*learnt, *speed_texts(row), f"{row['max_relative_gradient_error']:.1e}"])
    return tabulate(lines, HEADINGS, "plain", disable_numparse=True, colalign=["left"] + ["right"] * 6)


def same_training(row, reference) -> bool:
    """Whether a strategy computed the single device's gradients, and came to its loss."""
    same_loss = abs(row["loss"] - reference["loss"]) <= LOSS_EQUAL * reference["loss"]
    return same_loss and row["max_relative_gradient_error"] <= GRADIENTS_EQUAL


if __name__ == "__main__":
    end(ladder(int(sys.argv[1])))

"""A model of yours in train_gpt.py: a folder with the scripts, in which a notebook edits, loads and trains.

    begin()                                 the scripts and a stranger's model, in runs/45_own
    edit("gpt.py", diff)                    take out its lines with -, and put in those with +
    load("gpt.py")                          the file as a module
    train("--tp 2", processes=2)            a short run in a job: its losses and norms, or the line that it ends with

Taught in notebooks/45_one_mesh.ipynb.
"""

import re
import runpy
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import patch

from mpdemo import paths
from mpdemo.labs.losses import losses_in, trained

FOLDER = "runs/45_own"
FLAGS = "--no-bf16 --no-compile --no-recompute"
END = re.compile(r"\w+Error: .+|nobody fills .+")


def begin(model: str = "poet.py") -> None:
    """Make the folder anew, with the scripts to take home and a model that was found."""
    scripts, folder = paths.source() / "notebooks" / "scripts", paths.root() / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("train_gpt.py", "gpt.py", "job.py", "text.txt", "train.sbatch"):
        shutil.copy(scripts / name, folder)
    shutil.copy(scripts / "found" / model, folder)
    print(*sorted(path.name for path in folder.iterdir()))


def edit(name: str, diff: str) -> None:
    """Take out a file's lines with -, and put those with + in their place, or behind a line with a space."""
    path = paths.root() / FOLDER / name
    text = "\n" + path.read_text()
    for there, added in re.findall(r"((?:^[- ].*\n)+)((?:^\+.*\n)*)", diff, re.M):
        old = "\n" + re.sub(r"^.", "", there, flags=re.M)
        assert text.count(old) == 1, f"{text.count(old)} times in {name}: {old!r}"
        new = "".join(f"{line[1:]}\n" for line in (there + added).splitlines() if line[0] != "-")
        text = text.replace(old, "\n" + new)
    path.write_text(text[1:])
    out, added = (sum(line[:1] == sign for line in diff.splitlines()) for sign in "-+")
    print(f"{name}: lines out {out}, in {added}")


def load(name: str) -> SimpleNamespace:
    """Run a file of the folder, and return what it defines."""
    folder = paths.root() / FOLDER
    with patch.object(sys, "path", [str(folder), *sys.path]):
        return SimpleNamespace(**runpy.run_path(str(folder / name)))


def train(flags: str = "", processes: int = 1) -> tuple[list[float], list[float]]:
    """Train 20 steps anew; print and return losses and gradient norms of steps 10 and 20, or print how it ended."""
    name = "45_" + (re.sub(r"\W+", "", flags) or "one")
    shutil.rmtree(paths.root() / FOLDER / "try", ignore_errors=True)  # a checkpoint, which it would resume
    command = f"{FOLDER}/train_gpt.py --steps 20 {FLAGS} {flags} --checkpoint {FOLDER}/try/run"
    said = trained(command, processes, name, fails=True)
    losses, norms = losses_in(said), [float(norm) for norm in re.findall(r", gradient ([\d.]+)", said)]
    found = f"losses {losses}, gradient norms {norms}" if losses else END.findall(said)[0]
    print(f"{flags or 'one process'}: {found}")
    return losses, norms

"""A model of yours in train_gpt.py: a folder with the scripts, in which a notebook edits, loads and trains.

    begin()                                 the scripts and a stranger's model, in runs/45_own
    edit("gpt.py", (old, new), ...)         replace texts, and show the lines that changed
    load("gpt.py")                          the file as a module
    train("--tp 2", processes=2)            a short run in a job: its losses, or the line that it ends with

Taught in notebooks/45_one_mesh.ipynb.
"""

import difflib
import re
import runpy
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import patch

from mpdemo import paths
from mpdemo.labs.losses import losses_in, trained
from mpdemo.notebook.show import Bundle

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


def edit(name: str, *pairs: tuple[str, str]) -> Bundle:
    """Replace texts in a file, each of which must be there, and display the lines that changed."""
    path = paths.root() / FOLDER / name
    before = text = path.read_text()
    for old, new in pairs:
        assert old in text, f"not in {name}: {old!r}"
        text = text.replace(old, new)
    path.write_text(text)
    lines = difflib.unified_diff(before.splitlines(), text.splitlines(), n=0, lineterm="")
    shown = "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))
    return Bundle(shown, markdown=f"```diff\n{shown}\n```")


def load(name: str) -> SimpleNamespace:
    """Run a file of the folder, and return what it defines."""
    folder = paths.root() / FOLDER
    with patch.object(sys, "path", [str(folder), *sys.path]):
        return SimpleNamespace(**runpy.run_path(str(folder / name)))


def train(flags: str = "", processes: int = 1) -> list[float]:
    """Train 20 steps anew; print and return the losses of steps 10 and 20, or print how it ended."""
    name = "45_" + (re.sub(r"\W+", "", flags) or "one")
    shutil.rmtree(paths.root() / FOLDER / "try", ignore_errors=True)  # a checkpoint, which it would resume
    command = f"{FOLDER}/train_gpt.py --steps 20 {FLAGS} {flags} --checkpoint {FOLDER}/try/run"
    said = trained(command, processes, name, fails=True)
    losses = losses_in(said)
    print(f"{flags or 'one process'}: {losses or END.findall(said)[0]}")
    return losses

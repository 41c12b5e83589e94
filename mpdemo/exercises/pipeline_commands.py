"""The checks of 05.8 and 05.13: a command to repair, and one that starts the script to take home."""

import re
import shlex
import tempfile
from itertools import pairwise
from pathlib import Path

from mpdemo.cuts import block_names, resolve_cut
from mpdemo.errors import UserError
from mpdemo.exercises.answers import training_of
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.run import run_on_ranks
from mpdemo.paths import root, source
from mpdemo.settings import checked


@exercise("05.8", expects="a command that begins with torchrun")
def repair_a_command(path):
    launch, settings = training_of(path.read_text())
    number = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", " ".join(launch))
    require(number, "It does not say --nproc-per-node=NUMBER.")
    processes = int(number[1])
    require(settings.rung == "pipeline", f"This trains the rung {settings.rung}.")
    require(processes == 4, f"It starts {processes} processes; the machine has four GPUs.")
    require(settings.schedule == "1f1b", f"Its schedule is {settings.schedule}; 1f1b was chosen for its memory.")
    require(settings.batch_size == 64, f"The batch has {settings.batch_size} images: that is another training.")
    try:
        used = checked(settings, processes)
        points = resolve_cut(block_names(used.model), used.cut, processes)
    except UserError as error:
        message = str(error).partition("; allowed")[0].partition(": name ")[0]
        raise Wrong(f"It stops at once: {message}.") from None
    sizes = [stop - start for start, stop in pairwise([0, *points, 10])]
    require(
        max(sizes) <= 3, f"It runs, and one of the stages has {max(sizes)} of the 10 blocks: the others wait for it."
    )
    return "It is refused in the notebook too, before a queue: train_command and check know these rules."


@exercise("05.13", expects='a text such as "--cut 3 --microbatches 4"')
def three_stages(answer):
    words = shlex.split(answer)
    require("--data" not in words, "Leave --data out; it is given already.")
    require(
        not any("," in word for word in words), "The script takes the numbers after --cut with spaces between them."
    )
    script, data = (root() / "notebooks/take_home/train_pipeline.py"), source() / "mpdemo/data/digits.npz"
    with tempfile.TemporaryDirectory(prefix="mpdemo-exercise-") as folder:
        options = ["--data", str(data), "--epochs", "1", "--checkpoint", f"{folder}/model", *words]
        program = Path(folder, "start.py")
        start = f"sys.argv = {[str(script), *options]!r}\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
        program.write_text(f"import runpy, sys\n{start}")
        try:
            printed = run_on_ranks(program, processes=3, seconds=40, folder=folder)
        except Wrong as wrong:  # its line is one of a program that the reader does not see
            raise Wrong(re.sub(r" \(line \d+\)$", "", str(wrong))) from None
        sizes = [_count_of_weights(Path(folder, f"model-stage{stage}.pt")) for stage in range(3)]
    require("epoch 1 loss" in printed[2], f"It ran, and the last stage printed {printed[2][:60]!r}.")
    require(all(sizes), f"It ran, and the stages have {sizes} weights: a stage without weights learns nothing.")
    require(
        sizes == [384, 9312, 5130],
        f"It ran, and the stages have {', '.join(map(str, sizes))} weights. Is each of the two blocks on one stage?",
    )
    first_layers = [int(word) for word in words[words.index("--cut") + 1 :] if word.isdigit()][:2]
    require(first_layers == [3, 6], "It ran, and a layer without weights is on another stage than the task says.")
    return "Three processes trained it, and only the number of processes and --cut had changed."


def _count_of_weights(path) -> int:
    import torch

    return sum(weight.numel() for weight in torch.load(path)["model"].values())

"""Checks of notebook 12: the settings of a plan that fits, and a plan that asks for too much."""

import re

from checks.job_files import told, training_of
from mpdemo.settings import checked

NOT_THIS = {  # why a strategy isn't the answer where DDP fits
    "single": "all devices but one would do nothing.",
    "data_parallel": "one process for all devices has one GIL and can't use a second node (notebook 02).",
}


def check_11_5(path):
    text = path.read_text()
    _, settings = training_of(text)
    with told("It stops at once"):
        used = checked(settings, 4)
    assert (used.model, used.batch_size) == ("transformer", 64), "It now trains another model or batch."
    assert used.optimizer == "adamw", f"It now trains with another optimizer: {used.optimizer}."
    tasks = re.search(r"^#SBATCH --ntasks-per-node=(\d+)", text, re.M)
    assert tasks and tasks[1] == "4", "It doesn't start four processes, one per device."
    why = "a device holds the whole model and its share at once."
    assert used.rung == "ddp", f"{used.rung} would run; but {NOT_THIS.get(used.rung, why)}"
    assert used.microbatches == 1, f"Each device's share would be cut into {used.microbatches} parts: it fits whole."
    assert used.cut is None, "A part of the old plan is still in the command: DDP cuts nothing."
    saves = used.precision != "fp32" or used.activation_checkpointing
    assert not saves, "It saves memory as well: the rules find an answer before they ask for bf16 or checkpointing."

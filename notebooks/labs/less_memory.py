"""What the options that save memory save, and what they cost: memory, time and gradients of a step.

    python -m mpdemo.labs.less_memory runs/lab tricks

Runs in one process, on one device. It writes ``summary.json`` in the folder. Taught in notebooks/12_which_one.ipynb.
"""

import sys
from dataclasses import replace

from mpdemo.compare import Comparison, model_and_batch, run_lab
from mpdemo.notebook.recipe import recipe
from mpdemo.paired import ROUNDS, ratio, to_row
from mpdemo.plan.counting import peak_of_a_step
from mpdemo.settings import Settings, as_arguments
from mpdemo.trial import Trial, relative_difference
from mpdemo.world.launch import end

OPTIONS = ({}, {"microbatches": 4}, {"precision": "bf16"}, {"activation_checkpointing": True})


def tricks(world):
    """Time the course model's step alternately without an option ("plain") and with each one, named as you type it.

    Each has ``slower`` (how many times as long as the plain step it takes, paired) and its ``slower_interval``,
    ``peak`` (bytes of all tensors at the peak) and ``difference`` (of the gradients to the plain step's, relative, the
    largest of all parameters).
    """
    plain = Settings(**recipe("single"))
    variants = {" ".join(as_arguments(option)) or "plain": replace(plain, **option) for option in OPTIONS}
    model, batch = model_and_batch(plain)
    peaks = {name: peak_of_a_step(Trial(settings, world, model, batch)) for name, settings in variants.items()}
    comparison = Comparison(world, model, batch)
    gradients = {name: comparison.add(name, settings).gradients() for name, settings in variants.items()}
    comparison.run(ROUNDS, warmup=0)  # the gradients were a first step; where bf16 has no units, each takes long
    return {
        name: {
            **to_row("slower", ratio(comparison.seconds[name], comparison.seconds["plain"])),
            "peak": peaks[name],
            "difference": relative_difference(gradients[name], gradients["plain"]),
        }
        for name in variants
    }


if __name__ == "__main__":
    end(run_lab({"tricks": tricks}, sys.argv[1], sys.argv[2:]))

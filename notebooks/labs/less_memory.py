"""What the options that save memory or time save, and what they cost: memory, time and gradients of a step.

    python -m mpdemo.labs.less_memory runs/lab tricks layout

Runs in one process, on one device. It writes ``summary.json`` in the folder. Taught in notebooks/11_which_one.ipynb.
"""

import sys
from dataclasses import replace

from mpdemo.compare import Comparison, model_and_batch, run_lab
from mpdemo.notebook.recipe import recipe
from mpdemo.plan.counting import peak_of_a_step
from mpdemo.settings import Settings, as_arguments
from mpdemo.trial import Trial, relative_difference
from mpdemo.world.launch import end

TRICKS = ({}, {"microbatches": 4}, {"precision": "bf16"}, {"activation_checkpointing": True})
LAYOUT = ({}, {"channels_last": True})


def tricks(world):
    """Compare a plain step of the course model with the options that need less memory. See `compare`."""
    return compare(Settings(**recipe("single")), TRICKS, world)


def layout(world):
    """Compare a step of the ConvNet in the usual memory layout and channels last. See `compare`."""
    return compare(Settings(rung="single", model="convnet", batch_size=128), LAYOUT, world)


def compare(plain, options, world, rounds=3):
    """Time a training run alternately with some options, which differ from `plain`; the first is empty.

    By option as you type it ("plain" without): ``seconds`` of a step (one number per round), ``slower`` (ratio of the
    median to the plain step's), ``peak`` (bytes of all tensors at the peak) and ``difference`` (of the gradients to the
    plain step's, relative, the largest of all parameters).
    """
    variants = {" ".join(as_arguments(option)) or "plain": replace(plain, **option) for option in options}
    model, batch = model_and_batch(plain)
    peaks = {name: peak_of_a_step(Trial(settings, world, model, batch)) for name, settings in variants.items()}
    comparison = Comparison(world, model, batch)
    gradients = {name: comparison.add(name, settings).gradients() for name, settings in variants.items()}
    comparison.run(rounds, warmup=0)  # the gradients were a first step; where bf16 has no units, each takes long
    return {
        name: {
            "seconds": comparison.seconds[name],
            "slower": comparison.ratio(name, "plain")[0],
            "peak": peaks[name],
            "difference": relative_difference(gradients[name], gradients["plain"]),
        }
        for name in variants
    }


if __name__ == "__main__":
    end(run_lab({"tricks": tricks, "layout": layout}, sys.argv[1], sys.argv[2:]))

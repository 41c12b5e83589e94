"""What saves memory or time on every rung, done once: types, layout, checkpointing, compiling, accumulating.

`mpdemo.parallel.make` calls `prepare` before a rung copies or cuts the model, and `finish` after it; so a rung's file
holds only what is its own. mpdemo/savings.py says what can be combined. Taught in notebooks/11_which_one.ipynb.
"""

from contextlib import nullcontext

import torch

from mpdemo.errors import UserError


def prepare(model, settings, device):
    """Tell an uncut model how to compute; its stages and copies will do the same."""
    model.precision = precision_of(settings.precision, device.type)
    model.checkpointing = settings.activation_checkpointing
    model.channels_last = settings.channels_last
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)


def precision_of(name, device_type):
    """Return the type that autocast computes in on a "cpu" or a "cuda" device, None for plain float32.

    Raises
    ------
    UserError
        fp16 on a CPU, where it is many times slower than fp32.
    """
    if name == "fp16" and device_type == "cpu":
        raise UserError("--precision fp16 is many times slower than fp32 on a CPU; allowed there: fp32, bf16")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def finish(rung, settings):
    """Compile the stages of a rung, and let it accumulate gradients, where the settings ask for it."""
    if settings.compile:
        compile_blocks(rung)
    if settings.accumulate > 1:
        rung.step = accumulated(rung, settings.accumulate)
    return rung


def compile_blocks(rung):
    """Compile every block of a rung's stages: equal blocks share their machine code.

    Training steps all have one shape, and are compiled in the first. Validation, with others, stays as it is.
    """
    torch._inductor.config.compile_threads = 1  # a rank has one core
    torch._dynamo.config.recompile_limit = 64  # the blocks of a ResNet differ
    for stage in rung.stages:
        for name in stage.names:
            stage.get_submodule(name).compile()
    rung.evaluate = torch.compiler.set_stance("force_eager")(rung.evaluate)


def accumulated(rung, parts):
    """Return a step that computes a batch in `parts` equal parts, one after the other, and adds up their gradients.

    The rung was built for a part: to it, each part is a batch. Replicas exchange gradients after the last one only.
    """
    step, pipeline = rung.step, getattr(rung, "schedule", None)
    shares = parts  # the mean of the parts' means is the batch's mean
    if pipeline:  # would divide the gradients of the earlier parts with those of each later part
        shares, pipeline.scale_grads = parts * rung.microbatches, False

    def accumulated_step(images, labels):
        total, correct = 0, 0
        *earlier, last = zip(images.chunk(parts), labels.chunk(parts), strict=True)
        for part in (*earlier, last):
            with nullcontext() if part is last else rung.no_sync():
                loss, right = step(*part)
            total, correct = total + loss / parts, correct + right
        for parameter in rung.named_parameters().values():
            parameter.grad /= shares
        return total, correct

    return accumulated_step

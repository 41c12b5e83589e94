"""The checks of notebooks/01_single_device.ipynb: a step, its parts, the clock, the loader, memory, accuracy."""

import math

from mpdemo.exercises.answers import close
from mpdemo.exercises.check import exercise, require
from mpdemo.exercises.run import run_on_ranks
from mpdemo.exercises.single_device_runs import (
    DEVICE_SECONDS,
    STEPS,
    accumulation_result,
    accuracy_case,
    drive_clock,
    drive_loop,
)

MIB = 2**20


@exercise("01.1", expects="a number")
def two_backward_calls(answer):
    import torch

    x, w = torch.tensor([1.0, 2, 3, 4]), torch.tensor(2.0, requires_grad=True)
    for _ in range(2):
        ((w * x - 3 * x) ** 2).mean().backward()
    one_call = w.grad.item() / 2
    require(answer != one_call, f"{one_call:g} is the gradient of one call. Does the second call replace it?")
    require(answer != -w.grad.item(), "The size is right. Would a larger w make the loss larger or smaller?")
    require(answer == w.grad.item(), f"Two calls on the same four numbers do not leave {answer} in w.grad.")
    return "So a loop must clear the gradients in every step, and the parts of a batch can be computed one by one."


@exercise("01.2", expects="a function accumulate(model, optimizer, loss_fn, images, labels, parts)")
def accumulation(function):
    whole = accumulation_result(None, parts=1)
    for parts in (3, 4):
        done = accumulation_result(function, parts)
        require(done["steps"] > 0, "The optimizer never made its step: no weight has moved.")
        require(done["steps"] == 1, f"The optimizer made {done['steps']} steps for one batch of {parts} parts.")
        require(sum(done["sizes"]) == 12, f"Of 12 images the model saw {sum(done['sizes'])}.")
        require(max(done["sizes"]) <= 12 // parts, f"The model saw {max(done['sizes'])} of 12 images in one forward.")
        ratio = done["gradient"] / whole["gradient"]
        last = done["last part"] / whole["gradient"]
        require(not close(ratio, parts), f"With {parts} parts the gradient is {parts} times that of the whole batch.")
        only_last = close(ratio, last) or close(ratio, last / parts)
        require(not only_last, f"Only the gradient of the last of {parts} parts is left when the optimizer steps.")
        shown = f"With {parts} parts the gradient is {ratio:.3g} times that of the batch"
        require(not close(ratio, 1 + done["older"] / whole["gradient"]), f"{shown}: an older one was still in .grad.")
        require(close(ratio, 1), f"{shown}.")
        passes = f"{parts} parts went through {done['backward passes']} backward pass together"
        require(done["backward passes"] >= parts, f"{passes}: until then the activations of the whole batch were kept.")
    return "Two threads, two processes or the microbatches of a pipeline may compute the parts: notebooks 02, 03, 05."


@exercise("01.3", expects="a program that defines train(model, optimizer, loss_fn, batches)")
def training_loop(path):
    (result,) = run_on_ranks(path, drive_loop, processes=1)
    losses, right, never_cleared = result["losses"], result["right"], result["never cleared"]
    require(len(losses) == len(right), f"For {len(right)} batches it returned {len(losses)} losses.")
    moved = result["moved"]
    require(moved, f"After {len(right)} steps no weight has moved: the optimizer finds no gradient.")
    same = all(close(a, b, 1e-4) for a, b in zip(losses, never_cleared, strict=True))
    require(not same, f"In step {len(right)} the optimizer still follows the gradient of step 1, added to all others.")
    for step, (loss, expected) in enumerate(zip(losses, right, strict=True), 1):
        require(close(loss, expected, 1e-4), f"In step {step} the loss is {loss:.4f}; a right loop has {expected:.4f}.")
    broken = "more than twice that" if never_cleared[-1] > 2 * losses[-1] else "no such loss"
    return f"The loss is {losses[-1]:.2f} after {len(losses)} steps; the broken loop had {broken}."


@exercise("01.4", expects="a number")
def reading_every_step(answer):
    require(not close(answer, 2), "2 belongs to a host and a device that need the same time.")
    require(
        not close(answer, 5), "10 ms / 2 ms compares device and host. Compare two loops: taking turns, side by side."
    )
    require(answer >= 1, "Reading in every step cannot be faster: the device then waits for the host.")
    require(close(answer, 12 / 10), f"{answer} is not it. A step in turns takes the sum; side by side, the longer one.")
    return "The less the host does between two steps, the less a read costs. A slow loader makes each read expensive."


@exercise("01.5", expects="a program that defines measure(device, batches)")
def measurement(path):
    (result,) = run_on_ranks(path, drive_clock, processes=1)
    losses, waits, reported = result["losses"], result["waits"], result["reported"]
    require(
        losses == list(range(STEPS)), f"The losses of {STEPS} steps should come back in order; it returned {losses}."
    )
    early = [launched for launched in waits if launched < STEPS]
    require(len(early) <= STEPS // 5, f"The host waited {len(early)} times before the last step: they take turns.")
    busy = 1000 * DEVICE_SECONDS
    require(
        1000 * reported > 0.97 * busy,
        f"It reports {1000 * reported:.1f} ms a step, but the device computes {busy:.0f} ms for each. "
        "The clock was read before the device had done its work.",
    )
    return f"It reports {1000 * reported:.1f} ms for a device that computes {busy:.0f} ms: measured, not launched."


@exercise("01.6", expects="a dictionary {0: ..., 1: ..., 2: ..., 4: ...} of milliseconds")
def loader_processes(answer):
    require(set(answer) == {0, 1, 2, 4}, f"It needs the numbers of loader processes 0, 1, 2 and 4, not {list(answer)}.")
    load, device = 120, 60
    for workers, value in answer.items():
        right = load + device if workers == 0 else max(load / workers, device)
        shown = f"{workers} loader processes" if workers != 1 else "1 loader process"
        added = workers and close(value, load / workers + device) and value not in (load, load + device)
        require(not added, f"{shown}: loading and computing overlap, so their times do not add up to {value}.")
        too_fast = value < device and not close(value, device)
        require(not too_fast, f"{shown}: {value} ms is less than the device needs for one batch.")
        hint = (
            "nobody loads while the device computes" if workers == 0 else f"a batch comes every {load / workers:g} ms"
        )
        require(close(value, right), f"{shown}: not {value} ms; {hint}, and the device needs {device} ms.")
    return "From the number on at which load / workers is below the device's time, more loader processes bring nothing."


@exercise("01.7", expects="two numbers, as in (1, 1)")
def backward_products(answer):
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    model, counted = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), []
    for layer in (model[:1], model):
        outputs = layer(torch.randn(8, 8))
        with FlopCounterMode(display=False) as counter:
            outputs.sum().backward()
        counted.append(counter.get_total_flops() // (2 * 8**3))
    first, later = counted[0], counted[1] - counted[0]
    require(len(answer) == 2, f"It needs two numbers: first layer, later layer; not {answer}.")
    swapped = tuple(answer) == (later, first)
    require(not swapped, "Which layer has an input that needs no gradient: the first one, or a later one?")
    require(answer[1] == later, f"A later layer: not {answer[1]}. What changes the loss there: its weights, and ...?")
    require(answer[0] == first, f"The first layer: not {answer[0]}. Who would use the gradient of the images?")
    return "So in a deep network the backward pass has nearly twice the arithmetic of the forward pass."


@exercise("01.8", expects="a number of MiB")
def training_state(answer):
    from mpdemo import models

    parameters = sum(parameter.numel() for parameter in models.build("transformer").parameters())
    mib = parameters * 4 / MIB
    require(not close(answer, mib), f"{answer} MiB holds the weights alone.")
    require(
        not close(answer, 2 * mib),
        f"{answer} MiB is two numbers per parameter. Weights, gradients and AdamW: which are not counted?",
    )
    require(
        not close(answer, 3 * mib),
        f"{answer} MiB is three numbers per parameter. Weights, gradients and AdamW: what has two?",
    )
    in_mb = close(answer, 16 * parameters / 1e6, 0.005)
    require(not in_mb, f"{answer} is in MB (10**6 bytes). 1 MiB is 2**20 bytes.")
    require(
        close(answer, 4 * mib), f"{answer / mib:.3g} numbers of 4 bytes per parameter: count once more what is kept."
    )
    return "This does not depend on the batch. It is what sharding divides among devices."


@exercise("01.9", expects="a whole number of images")
def largest_batch(answer):
    from mpdemo.plan import memory

    require(answer == int(answer) and answer > 0, f"A batch of {answer} images cannot be made.")
    shape = {"optimizer": "adamw", "classes": 10, "channels": 1}
    needed = memory.estimate("transformer", [], int(answer), 28, **shape)[0].peak / MIB
    require(needed <= 1024, f"A step with {answer} images needs {needed:.0f} MiB; the device has 1024.")
    require(needed > 0.93 * 1024, f"A step with {answer} images needs {needed:.0f} MiB only. More would fit.")
    return f"It needs {needed:.0f} MiB. With accumulation the same device can train with any larger batch."


@exercise("01.10", expects="a function accuracy(model, loader)")
def accuracy(function):
    model, loader, right, means, padded, in_training = accuracy_case()
    value = float(function(model, loader))
    require(
        not close(value, means), f"{value:.3f} is the mean of the batches' accuracies: the last batch has 2 images."
    )
    require(not close(value, padded), f"{value:.3f} divides by 3 batches of 4 images; there are 10 images.")
    require(value <= 1, f"{value:.3g} is no share of the images: divide the right answers by all images.")
    training = close(value, in_training)
    require(not training, f"{value:.3f} belongs to training mode: the answers depend on the other images of the batch.")
    require(close(value, right), f"{value:.3f} is not the share of right answers among all 10 images.")
    return "It counts images, not batches, so it also holds when several processes share the validation images."


@exercise("01.11", expects="a number")
def first_loss(answer):
    require(
        not close(answer, 0.9), "0.9 is the share of wrong guesses. The loss is -ln of the right digit's probability."
    )
    require(not close(answer, 1.0), "1.0 is the logarithm to base 10. Cross entropy uses the natural one.")
    require(not close(answer, 0.1), "0.1 is the probability itself. The loss is its negative logarithm.")
    require(answer > 0, "The logarithm of a probability is negative. The loss is minus that.")
    require(close(answer, math.log(10), 0.02), f"Equal probabilities for ten digits do not give a loss of {answer}.")
    return "A first loss far above it tells of a wrong initialisation or of images that are not normalised."

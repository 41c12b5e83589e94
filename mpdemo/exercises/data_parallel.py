"""The checks of notebooks/02_data_parallel.ipynb: five moves by hand, threads, bounds, and larger batches."""

import math
import re

from mpdemo.errors import UserError
from mpdemo.exercises.answers import close
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.data_parallel_ranks import NUMBERS, drive_gradients, drive_outputs, drive_replicate
from mpdemo.exercises.gradients import MISSING
from mpdemo.exercises.run import run_on_ranks
from mpdemo.jobs import JobSpec, load_site, render, train_command
from mpdemo.settings import Settings, checked


@exercise("02.1", expects="a number")
def mean_of_means(answer):
    require(not close(answer, 4.5), "4.5 is the mean over all ten images. The four parts are not equally large.")
    require(not close(answer, 5.0), "5.0 belongs to parts of 3, 3, 2 and 2 images. `chunk` does not even them out.")
    parts = [NUMBERS[start : start + 3] for start in (0, 3, 6, 9)]
    mean = sum(sum(value - 1 for value in part) / len(part) for part in parts) / 4
    require(close(answer, mean), f"Write down the four parts and their means: their mean is not {answer}.")
    return "The single image of the last part counts three times as much as the others. So one gathers first."


@exercise("02.2", expects="a program that defines outputs_of(w, x, devices)")
def scatter_apply_gather(path):
    (result,) = run_on_ranks(path, drive_outputs, processes=1)
    values, sizes = result["values"], [size for size, _ in result["products"]]
    require(isinstance(values, list), f"With ten numbers on 4 devices it returns a {values}, not one tensor.")
    expected = [2 * number for number in NUMBERS]
    if values != expected:
        order = sorted(values) == expected
        raise Wrong(f"w = 2 and x = 1 to 10 gave {values}" + (": the order of the images is lost." if order else "."))
    require(sizes != [10], "One product of all ten numbers was computed: nobody shares the work.")
    require(
        len(sizes) == 4,
        f"On 4 devices it computed {len(sizes)} products, of {sizes} numbers. Each device makes one product.",
    )
    require(not result["shared"], "A device computes with w itself, and not with a copy of it.")
    require(not all(main for _, main in result["products"]), "The main thread computed every product, one by one.")
    gradient, whole = result["gradient"], sum(NUMBERS) / 10
    require(gradient is not None, "No gradient arrives at w: the copies are cut off from it (detach?).")
    require(
        math.isclose(gradient, whole, rel_tol=1e-5),
        f"The gradient of the mean output is {gradient}, not that of w * x.",
    )
    return "It takes any number of devices; with more devices than images `chunk` makes fewer parts, and some rest."


@exercise("02.3", expects="a program that defines replicate(model, *copies)")
def replicate(path):
    (result,) = run_on_ranks(path, drive_replicate, processes=1)
    require(
        not result["shared"],
        "A copy now uses the memory of the model itself. On another device it must have its own.",
    )
    if result["wrong"]:
        number, kind, name = result["wrong"][0]
        every = all(entry[1] == "buffer" for entry in result["wrong"])
        more = " All weights are right." if every else ""
        raise Wrong(f"The {kind} {name!r} of copy {number} is not that of the model.{more}")
    return "This is the traffic of one forward pass: all weights and buffers go to every other device."


@exercise("02.4", expects="a program that defines gradients(model, images, labels, devices)")
def sum_of_gradients(path):
    (result,) = run_on_ranks(path, drive_gradients, processes=1)
    require(MISSING not in result["whole"].values(), "A parameter of the model has no gradient.")
    first_only = all(ratio is not None and close(ratio, 1, 1e-4) for ratio in result["first"].values())
    lost = "With 3 copies the model has the gradients of the first part only; those of the other copies are lost."
    require(not first_only, lost)
    for name, ratio in result["whole"].items():
        gradient = f"With 3 copies the gradient of {name}"
        require(ratio is not None, f"{gradient} has another direction than that of one device.")
        often = f"{gradient} is {ratio:.2f} times that of one device. How often is one loss divided?"
        require(close(ratio, 1, 1e-4), often)
    return "One loss over the gathered batch is divided by the number of images already, so gradients are added."


@exercise("02.5", expects="a list of four numbers")
def batch_norm_in_parts(answer):
    answer = [float(value) for value in answer]
    require(len(answer) == 4, f"There are four values, and this answer has {len(answer)}.")
    whole = [-1.18, -0.78, 0.78, 1.18]
    near = all(abs(value - other) < 0.03 for value, other in zip(answer, whole, strict=True))
    require(not near, "These come from the mean 6 over all four values. Does a copy see all four?")
    require(answer != [0, 2, 10, 12], "These are the inputs. Batch norm subtracts a mean and divides by a deviation.")
    require(max(map(abs, answer)) > 0.5, "The values of each part end with standard deviation 1; these are closer.")
    for which, inputs, outputs in (("first", "0 and 2", answer[:2]), ("second", "10 and 12", answer[2:])):
        right = all(abs(value - other) < 0.01 for value, other in zip(outputs, (-1, 1), strict=True))
        require(right, f"The {which} copy sees {inputs}. Their mean and deviation do not give {outputs}.")
    return "After batch norm 2 and 12 are the same number: what is large depends on which images share a device."


@exercise("02.6", expects='a dict of three numbers (ms): "matrix product", "sum(range(n))", "Python loop"')
def longest_pauses(answer):
    names = ("matrix product", "sum(range(n))", "Python loop")
    require(set(answer) == set(names), f"The answer needs the three names {', '.join(names)}.")
    strange = [value for value in answer.values() if value not in (0, 5, 1000)]
    require(not strange, f"{strange and strange[0]!r} is none of the three choices 0, 5 and 1000.")
    product, one_call, loop = (answer[name] for name in names)
    require(product == 0, "The matrix product is computed by an operator of PyTorch. Does it hold the GIL meanwhile?")
    require(
        one_call != 5,
        "Python can pass the GIL on only between two of its own instructions. How many is one call of sum?",
    )
    require(one_call == 1000, "sum adds up objects of Python: can it do so without the GIL?")
    require(
        loop != 1000, "A loop in Python is many instructions. A thread that waits for the GIL gets it after a while."
    )
    require(loop == 5, "Adding in Python needs the GIL. The main thread has to wait for it, a little.")
    return "So threads share the operators' time, but they never add up two pieces of Python at once."


@exercise("02.7", expects="a dict: processes_per_node, gpus_per_process, devices")
def four_devices(answer):
    answer = dict(answer)
    devices = answer.pop("devices", None)
    out = "runs/four"
    try:
        command = train_command(rung="data_parallel", devices=devices, batch_size=64, out=out)
        spec = JobSpec(name="four", command=command, out=out, **answer)
        text = render(spec, load_site("generic"))
        used = checked(Settings(rung="data_parallel", devices=devices, batch_size=64), spec.world_size).devices
    except UserError as error:
        raise Wrong(f"This job would fail: {error}") from None
    gpus = int(re.search(r"--gres=gpu:(\d+)", text)[1])
    require(used <= gpus, f"The program wants {used} devices, and the job asks for {gpus} GPU per node.")
    require(used == 4, f"The program would use {used} of the four GPUs.")
    require(gpus == 4, f"The job asks for {gpus} GPUs and uses four.")
    return "One task with all GPUs of the node. With one process per device (notebook 03) it is four tasks instead."


@exercise("02.8", expects="a number")
def amdahl(answer):
    require(not close(answer, 8), "8 would need every millisecond to be shared. Who shares the 20 ms of Python?")
    require(not close(answer, 5), "5 is the limit for any number of devices. On eight the operators still take time.")
    require(not close(answer, 0.3), "This is a share of the time. The speed-up is the old time divided by the new.")
    require(not close(answer, 30), "This is the time of the step in ms. How many times faster is that than 100 ms?")
    time = 20 + 80 / 8
    require(
        close(answer, 100 / time, 0.02),  # 3.3 is as good as 3.33
        f"A speed-up of {answer} means a step of {100 / answer:.1f} ms. Add up what it takes.",
    )
    return "With any number of devices it stays below 5. One process per device shares the Python code too."


@exercise("02.9", expects="a number (MiB)")
def through_the_first(answer):
    require(answer != 800, "100 MiB for each of eight devices: the first one has its weights already.")
    require(answer != 1600, "The first device sends nothing to itself, and receives nothing from itself.")
    require(answer != 700, "That is one direction. The weights go out, and what comes back?")
    require(
        answer == 1400, f"How many other devices are there, and what does each get and give? Not {answer} MiB in all."
    )
    return (
        "Every device that is added adds 200 MiB. Notebook 03 shares this work, and then no device has more than 400."
    )


@exercise("02.10", expects="a whole number")
def steps_per_epoch(answer):
    require(answer != 600, "600 steps of 100 images: that is one device. Here four processes take 100 each.")
    require(answer != 2400, "With four processes an epoch needs fewer steps, not more.")
    require(answer == 150, f"{answer} steps of 400 images would be {400 * answer:,} images.")
    return "Four times fewer updates of the weights, each with a gradient that is less noisy."


@exercise("02.11", expects="a function learning_rate(step, base, factor, warmup)")
def warm_up(answer):
    rates = [answer(step, 0.02, 8, 10) for step in range(20)]
    strange = [rate for rate in rates if not isinstance(rate, int | float)]
    require(not strange, f"It returned {strange and strange[0]!r}, which is no number.")
    require(not close(rates[15], 0.02), "After the warm-up the rate is still that of the small batch.")
    require(
        close(rates[15], 0.16), f"After the warm-up the rate is {rates[15]:.3g} (base 0.02, batch 8 times as large)."
    )
    require(rates[0] > 0, "The first step has the rate 0, so it changes nothing: step 0 is the first of ten.")
    require(not close(rates[0], 0.16), "The first step has the full rate already: nothing warms up.")
    require(close(rates[0], 0.016), f"The first of ten steps has {rates[0]:.3g}, and the full rate is 0.16.")
    require(close(rates[9], 0.16), f"The tenth and last step of the warm-up has {rates[9]:.3g}, not the full rate.")
    require(max(rates) < 0.17, f"The rate grows to {max(rates):.3g} and never stops at the full rate.")
    growth = [after - before for before, after in zip(rates[:9], rates[1:10], strict=True)]
    require(max(growth) - min(growth) < 1e-3, "The rate does not grow by the same amount in each step of the warm-up.")
    try:
        constant = answer(0, 0.02, 8, 0)
    except ZeroDivisionError:
        raise Wrong("With warmup = 0 it divides by zero.") from None
    require(close(constant, 0.16), f"With warmup = 0 the first step has {constant:.3g}.")
    return (
        "These are the rates of --lr 0.16 --warmup-steps 10: PyTorch multiplies the rate by such a factor (LambdaLR)."
    )

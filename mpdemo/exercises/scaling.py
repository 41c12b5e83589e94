"""The checks of notebooks/08_scaling.ipynb: efficiency, strong and weak scaling, a fit, and what to ask for."""

import math
from functools import partial
from statistics import mean, median

from mpdemo.errors import UserError
from mpdemo.exercises import answers
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.plan import imagenet
from mpdemo.plan.scaling import Run, fit
from mpdemo.plan.scaling_advice import advise, same_share

close = partial(answers.close, tolerance=1e-6)


@exercise("08.1", expects="a whole number")
def efficient_devices(answer):
    require(answer != 10, "10 is the limit of the speed-up. Asked is where the efficiency has fallen to one half.")
    require(answer > 0, "Count devices from 1 on.")
    share = 100 / (answer * 10 + 90)
    require(share >= 0.5, f"On {answer} devices the efficiency is {share:.2f}: less than one half.")
    require(answer == 11, f"On {answer} devices the efficiency is {share:.2f}; there are larger numbers with one half.")
    return "From there on more than every second device-hour that you pay for does nothing."


@exercise("08.2", expects="a function efficiency(devices, seconds, more_devices, fewer_seconds)")
def efficiency_of_two_runs(answer):
    first = answer(1, 100.0, 4, 31.25)
    require(isinstance(first, int | float), f"It returned {first!r}, which is no number.")
    require(not close(first, 3.2), "From 100 s on 1 device to 31.25 s on 4 it gives 3.2: this is the speed-up.")
    require(not close(first, 1.25), "From 100 s on 1 device to 31.25 s on 4 it gives 1.25: it is upside down.")
    require(close(first, 0.8), f"From 100 s on 1 device to 31.25 s on 4 it gives {first:.3g}.")
    second = answer(4, 100.0, 16, 31.25)
    wrong = f"From 100 s on 4 devices to 31.25 s on 16 it gives {second:.3g}; the devices became four times as many."
    require(close(second, 0.8), wrong)
    return "So a cluster whose smallest job is a node of four GPUs can be judged, too."


@exercise("08.3", expects="four whole numbers, such as (24, 32, 24, 32)")
def strong_and_weak(answer):
    strong_steps, strong_share, weak_steps, weak_share = answer
    require(strong_steps == 24, f"Strong scaling: 768 images in batches of 32 are not {strong_steps} steps.")
    require(strong_share != 32, "Strong scaling: 32 is the global batch. How many devices share it?")
    require(
        strong_share == 8, f"Strong scaling: four shares of {strong_share} images are a batch of {4 * strong_share}."
    )
    require(weak_share != 8, "Weak scaling: the share is that of the single device.")
    require(
        weak_share == 32,
        f"Weak scaling: a device has as many images per step as when it is alone. These are not {weak_share}.",
    )
    require(weak_steps != 24, "Weak scaling: with 24 steps of the larger batch it would train on 3072 images.")
    require(weak_steps == 6, f"Weak scaling: {weak_steps} steps of 128 images are {128 * weak_steps} images, not 768.")
    return "Weak scaling leaves each device as busy as before, and leaves the optimizer fewer steps."


STEPS = {  # a slow first and second step; on 2 devices each other number of skipped steps gives another speed-up
    1: ([3.0, 0.9, 0.5, 0.5, 0.5, 0.5], 64),
    2: ([5.0, 0.9, 0.4, 0.35, 0.25, 0.2], 64),
    4: ([9.0, 0.9, 0.6, 0.6, 0.6, 0.6], 256),
}


def _speedups(skipped, average=median):
    """Return the speed-ups of `STEPS` in images per second, without so many steps at the beginning."""
    rates = {n: batch / average(seconds[skipped:]) for n, (seconds, batch) in STEPS.items()}
    return {n: rate / rates[1] for n, rate in rates.items()}


@exercise("08.4", expects="a function speedups(runs)")
def repaired_table(answer):
    runs = [{"devices": n, "seconds": list(seconds), "batch": batch} for n, (seconds, batch) in STEPS.items()]
    result = answer(runs)
    require(isinstance(result, dict) and set(result) == {1, 2, 4}, "It returns no speed-up for 1, 2 and 4 devices.")
    require(close(result[1], 1), f"The speed-up of the first run over itself is {result[1]:.3g}.")
    right = _speedups(2)

    def is_like(values):
        return all(math.isclose(result[n], values[n], rel_tol=0.05) for n in (2, 4))

    unfair = "The run on 4 devices has four times the images in each step, and its steps are compared as if it had not."
    require(not math.isclose(result[4], right[4] * STEPS[1][1] / STEPS[4][1], rel_tol=0.15), unfair)
    upside_down = "It is upside down: the run that is faster has the smaller number."
    require(not is_like({n: 1 / value for n, value in right.items()}), upside_down)
    with_warmup = "Steps of the warm-up are part of it: they hold what happens once, and a long training has it once."
    warm = [_speedups(skipped, average) for skipped in (0, 1) for average in (median, mean)]
    require(not any(map(is_like, warm)), with_warmup)
    too_short = "It leaves out more steps than the report above."
    require(not any(is_like(_speedups(skipped)) for skipped in (3, 4, 5)), too_short)
    for n in (2, 4):
        asked = f"For {n} devices it gives {result[n]:.3g}; how many images per second has each run?"
        require(math.isclose(result[n], right[n], rel_tol=0.05), asked)
    return "Compare images per second, without the warm-up, and say of which work: the same batch, or the same share."


@exercise("08.5", expects='"strong", "weak", "both" or "neither"')
def equal_loss(answer):
    require(answer in ("strong", "weak", "both", "neither"), f"{answer!r} is none of the four.")
    require(answer != "neither", "One of them is the very training of one device: the same batches, the same steps.")
    require(answer == "strong", "In weak scaling the optimizer makes fewer steps, each with a larger batch.")
    return "So weak scaling needs a column for the loss; strong scaling needs none."


@exercise("08.6", expects='"compute", "communication" or "start"')
def what_was_not_seen(answer):
    require(answer in ("compute", "communication", "start"), f"{answer!r} is none of the three terms.")
    require(
        answer != "compute", "128 devices share it: 83 s on each of them are three hours on one. Who would not see it?"
    )
    require(answer != "communication", "From 64 to 128 devices it has half as many steps, each dearer by one sixth.")
    return "It costs every device the same: next to 342 minutes nobody sees it, next to 5 minutes it is a large part."


@exercise("08.7", expects="a function largest(runs, images, share, efficiency)")
def largest_efficient(answer):
    case = imagenet.RUNS[:3], imagenet.IMAGES, 128
    other = [Run(n, 5000 / n + 0.02 * math.log2(n) * 2000 / n + 20, 64 * n) for n in (2, 4, 8, 32)], 128_000, 64
    for runs, images, share in (case, other):
        for wanted in (0.6, 0.9):
            right = advise(fit(runs, images), same_share(share), wanted).efficient
            numbers = ", ".join(str(run.devices) for run in runs)
            asked = f"For runs on {numbers} devices and an efficiency of {wanted:g}"
            try:
                got = answer(runs, images, share, wanted)
            except UserError as error:  # of what the answer asks for
                raise Wrong(f"{asked} it ends with an error: {error}.") from None
            require(got is not None, f"{asked} it returns nothing.")
            require(isinstance(got, int), f"{asked} it returns {type(got).__name__}, which is no number of devices.")
            require(got == right, f"{asked} it returns {got}; the fitted model has another limit.")
    return "Three runs of some minutes decide how many devices a training of days should ask for."


@exercise("08.8", expects="two numbers of GPUs, such as (128, 128)")
def decide(answer):
    hours = {run.devices: run.devices * run.seconds / 3600 for run in imagenet.RUNS}
    minutes = {run.devices: run.seconds / 60 for run in imagenet.RUNS}
    for number in answer:
        require(number in hours, f"{number} is none of the measured numbers: {', '.join(map(str, hours))}.")
    one, three = answer
    late = f"On {one} GPUs it takes {minutes[one]:.0f} minutes, and the results are due in 15."
    require(minutes[one] <= 15, late)
    require(one == 32, f"On {one} GPUs it costs {hours[one]:.1f} GPU-hours; a cheaper number meets the deadline.")
    dear = f"Three trainings on {three} GPUs cost {3 * hours[three]:.1f} GPU-hours, and 20 are left."
    require(3 * hours[three] <= 20, dear)
    slow = (
        f"On {three} GPUs the three take {3 * minutes[three]:.0f} minutes; within the budget there is a faster number."
    )
    require(three == 16, slow)
    return (
        "The deadline sets the least number of devices, the budget sets the most; where they cross, ask for less work."
    )


@exercise("08.9", expects="a number of ms")
def gain_of_a_faster_network(answer):
    require(answer != 200, "200 ms is all of the communication. Of the hidden part nobody waits.")
    require(answer != 100, "100 ms is half of all communication. Which part of it does the step contain?")
    require(answer <= 50, f"{answer} ms is more than what the step waits for the network today.")
    require(answer == 50, f"{answer} ms: a network without any delay brings more than this.")
    return "At best: the exposed part can vanish, the hidden one is behind the backward pass already."


STEP_PARTS = [  # ms of a step of four ranks: the sum is the same, as all of them wait for the last one
    {"rank": 0, "loading": 5, "forward": 90, "backward": 190, "exposed": 125, "optimizer": 20},
    {"rank": 1, "loading": 5, "forward": 130, "backward": 200, "exposed": 75, "optimizer": 20},
    {"rank": 2, "loading": 160, "forward": 85, "backward": 150, "exposed": 15, "optimizer": 20},
    {"rank": 3, "loading": 5, "forward": 95, "backward": 215, "exposed": 95, "optimizer": 20},
]


@exercise("08.10", expects="a function straggler_of(rows)")
def slowest_rank(answer):
    others = [row | {"rank": row["rank"] + 4} for row in STEP_PARTS[:2]]
    backward = [STEP_PARTS[0] | {"backward": 300, "exposed": 15}, STEP_PARTS[3] | {"rank": 1}]
    for rows, right, which in (
        (STEP_PARTS, 2, "the four ranks above"),
        (others, 5, "the first two, numbered 4 and 5"),
        (backward, 0, "two ranks with other times"),
    ):
        got = answer([dict(row) for row in rows])
        require(got is not None, "It returns nothing; wanted is the number of a rank.")
        require(not isinstance(got, dict), "It returns a whole row; wanted is its rank.")
        known = [row["rank"] for row in rows]
        require(got in known, f"For {which} it returns {got!r}, which is the number of none of them.")
        longest = max(rows, key=lambda row: row["exposed"])["rank"]
        require(got != longest, f"For {which} it returns {got}. This rank waits for the others most.")
        require(got == right, f"For {which} it returns {got}. Another rank waits for the others less.")
    return "The one that others wait for has the least exposed communication, whatever keeps it busy."


@exercise("08.11", expects="a function cores(gpus, images_per_second_of_a_gpu, images_per_second_of_a_core)")
def cores_for_gpus(answer):
    for gpus, gpu, core, right in ((1, 600.0, 300.0, 2), (4, 625.0, 300.0, 9), (1, 100.0, 300.0, 1)):
        got = answer(gpus, gpu, core)
        case = f"{gpus} GPUs of {gpu:.0f} images/s and cores of {core:.0f} images/s: it returns {got!r}"
        require(isinstance(got, int | float), f"{case}, which is no number.")
        require(
            got * core >= gpus * gpu, f"{case}, and these cores read {got * core:.0f} of {gpus * gpu:.0f} images/s."
        )
        require(got == int(got), f"{case}, and there are whole cores only.")
        require(got == right, f"{case}; fewer cores are enough.")
    return "Ask for these cores as well as for the GPUs; without them the GPUs wait, and you pay for them all the same."

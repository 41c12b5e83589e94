"""Typical wrong answers to the exercises of notebook 08."""

import math
from statistics import mean, median

from mpdemo.plan.scaling import fit
from mpdemo.plan.scaling_advice import advise, same_batch, same_share


def speedup(devices, seconds, more_devices, fewer_seconds):
    return seconds / fewer_seconds


def upside_down(devices, seconds, more_devices, fewer_seconds):
    return more_devices * fewer_seconds / (devices * seconds)


def from_one_device(devices, seconds, more_devices, fewer_seconds):
    return seconds / fewer_seconds / more_devices


def prints(*numbers):
    print(numbers)


def unrepaired(runs):
    reference = mean(runs[0]["seconds"])
    return {run["devices"]: reference / mean(run["seconds"]) for run in runs}


def with_warmup(runs):
    rates = {run["devices"]: run["batch"] / mean(run["seconds"]) for run in runs}
    return {devices: rate / rates[1] for devices, rate in rates.items()}


def without_the_batch(runs):
    steps = {run["devices"]: median(run["seconds"][2:]) for run in runs}
    return {devices: steps[1] / seconds for devices, seconds in steps.items()}


def skipping(count):
    """Return the right function, but for the number of steps that it leaves out."""

    def speedups(runs):
        rates = {run["devices"]: run["batch"] / median(run["seconds"][count:]) for run in runs}
        return {devices: rate / rates[1] for devices, rate in rates.items()}

    return speedups


def rates_upside_down(runs):
    rates = {run["devices"]: run["batch"] / median(run["seconds"][2:]) for run in runs}
    return {devices: rates[1] / rate for devices, rate in rates.items()}


def seconds_times_batch(runs):
    times = {run["devices"]: run["batch"] * median(run["seconds"][2:]) for run in runs}
    return {devices: times[1] / seconds for devices, seconds in times.items()}


def rates_alone(runs):
    return {run["devices"]: run["batch"] / median(run["seconds"][2:]) for run in runs}


def the_fastest(runs, images, share, efficiency):
    return advise(fit(runs, images), same_share(share), efficiency).fastest


def the_advice(runs, images, share, efficiency):
    return advise(fit(runs, images), same_share(share), efficiency)


def the_same_batch(runs, images, share, efficiency):
    return advise(fit(runs, images), same_batch(share), efficiency).efficient


def always_the_default(runs, images, share, efficiency):
    return advise(fit(runs, images), same_share(share)).efficient


def in_percent(runs, images, share, efficiency):
    return advise(fit(runs, images), same_share(share), 100 * efficiency).efficient


def of_two_runs(runs, images, share, efficiency):
    return advise(fit(runs[:2], images), same_share(share), efficiency).efficient


def waits_most(rows):
    return max(rows, key=lambda row: row["exposed"])["rank"]


def longest_forward(rows):
    return max(rows, key=lambda row: row["forward"])["rank"]


def longest_computing(rows):
    return max(rows, key=lambda row: row["forward"] + row["backward"])["rank"]


def longest_before_the_backward_pass(rows):
    return max(rows, key=lambda row: row["loading"] + row["forward"])["rank"]


def the_index(rows):
    return min(range(len(rows)), key=lambda number: rows[number]["exposed"])


def the_row(rows):
    return min(rows, key=lambda row: row["exposed"])


def of_one_gpu(gpus, gpu, core):
    return math.ceil(gpu / core)


def not_rounded(gpus, gpu, core):
    return gpus * gpu / core


def rounded_down(gpus, gpu, core):
    return int(gpus * gpu / core)


def for_each_gpu(gpus, gpu, core):
    return gpus * math.ceil(gpu / core)


WRONG = {
    "08.1": [10, 9, 12, 20, 0],
    "08.2": [speedup, upside_down, from_one_device, prints],
    "08.3": [(24, 32, 24, 32), (6, 8, 24, 32), (24, 8, 24, 32), (24, 8, 6, 8), (24, 4, 6, 32)],
    "08.4": [
        unrepaired,
        with_warmup,
        without_the_batch,
        rates_alone,
        prints,
        rates_upside_down,
        seconds_times_batch,
        *map(skipping, (0, 1, 3, 4, 5)),
    ],
    "08.5": ["weak", "both", "neither", "all"],
    "08.6": ["compute", "communication", "network"],
    "08.7": [the_fastest, the_advice, the_same_batch, always_the_default, prints, in_percent, of_two_runs],
    "08.8": [(16, 16), (64, 16), (32, 32), (32, 4), (128, 128), (48, 16)],
    "08.9": [200, 100, 150, 25],
    "08.10": [
        waits_most,
        longest_forward,
        longest_computing,
        longest_before_the_backward_pass,
        the_index,
        the_row,
        prints,
    ],
    "08.11": [of_one_gpu, not_rounded, rounded_down, for_each_gpu, prints],
}

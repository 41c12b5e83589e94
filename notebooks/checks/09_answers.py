"""Checks of notebook 09: efficiency, a table that compares what is equal, a fit, a straggler, cores for GPUs."""

import math
from statistics import mean, median

from checks.job_files import told


def close(value, right, tolerance=1e-6):
    return math.isclose(value, right, rel_tol=tolerance)


def check_08_1(efficiency):
    first, case = efficiency(1, 100.0, 4, 31.25), "From 100 s on 1 device to 31.25 s on 4 it gives"
    assert not close(first, 3.2), f"{case} 3.2: this is the speed-up."
    assert close(first, 0.8), f"{case} {first:.3g}."
    second = efficiency(4, 100.0, 16, 31.25)
    assert close(second, 0.8), f"From 4 to 16 devices it gives {second:.3g}; the devices became four times as many."


STEPS = {  # a slow first and second step; on 2 devices each other number of skipped steps gives another speed-up
    1: ([3.0, 0.9, 0.5, 0.5, 0.5, 0.5], 64),
    2: ([5.0, 0.9, 0.4, 0.35, 0.25, 0.2], 64),
    4: ([9.0, 0.9, 0.6, 0.6, 0.6, 0.6], 256),
}


def speedups_without(skipped, average=median):
    """Return the speed-ups of `STEPS` in images per second, without so many steps at the beginning."""
    rates = {n: batch / average(seconds[skipped:]) for n, (seconds, batch) in STEPS.items()}
    return {n: rate / rates[1] for n, rate in rates.items()}


def check_08_2(speedups):
    result = speedups([{"devices": n, "seconds": [*seconds], "batch": batch} for n, (seconds, batch) in STEPS.items()])
    right = speedups_without(2)

    def is_like(values):
        return all(close(result[n], values[n], 0.05) for n in (1, 2, 4))

    unfair = "On 4 devices each step has four times the images, and is compared as if it hadn't."
    assert not close(result[4], right[4] / 4, 0.15), unfair
    warm = [speedups_without(skipped, average) for skipped in (0, 1) for average in (median, mean)]
    assert not any(map(is_like, warm)), "It includes steps of the warm-up, which hold what happens once in a run."
    short = [speedups_without(skipped) for skipped in (3, 4, 5)]
    assert not any(map(is_like, short)), "It leaves out more steps than the report above."
    assert is_like(right), f"It gives {result}; how many images per second has each run?"


def check_08_3(largest):
    from mpdemo.plan import imagenet
    from mpdemo.plan.scaling import Run, advise, fit, same_share

    case = imagenet.RUNS[:3], imagenet.IMAGES, 128
    other = ([Run(n, 5000 / n + 0.02 * math.log2(n) * 2000 / n + 20, 64 * n) for n in (2, 4, 8, 32)], 128_000, 64)
    for runs, images, share in (case, other):
        for wanted in (0.6, 0.9):
            right = advise(fit(runs, images), same_share(share), wanted).efficient
            numbers = ", ".join(str(run.devices) for run in runs)
            asked = f"For runs on {numbers} devices and an efficiency of {wanted:g}"
            with told(f"{asked} it ends with an error"):
                got = largest(runs, images, share, wanted)
            assert isinstance(got, int), f"{asked} it returns {type(got).__name__}, which is no number of devices."
            assert got == right, f"{asked} it returns {got}; the fitted model has another limit."


STEP_PARTS = [  # ms of a step of four ranks: the sum is the same, as all of them wait for the last one
    {"rank": 0, "loading": 5, "forward": 90, "backward": 190, "exposed": 125, "optimizer": 20},
    {"rank": 1, "loading": 5, "forward": 130, "backward": 200, "exposed": 75, "optimizer": 20},
    {"rank": 2, "loading": 160, "forward": 85, "backward": 150, "exposed": 15, "optimizer": 20},
    {"rank": 3, "loading": 5, "forward": 95, "backward": 215, "exposed": 95, "optimizer": 20},
]


def check_08_5(straggler_of):
    others = [row | {"rank": row["rank"] + 4} for row in STEP_PARTS[:2]]
    backward = [STEP_PARTS[0] | {"backward": 300, "exposed": 15}, STEP_PARTS[3] | {"rank": 1}]
    for rows, right, which in (
        (STEP_PARTS, 2, "the four ranks above"),
        (others, 5, "the first two, numbered 4 and 5"),
        (backward, 0, "two ranks with other times"),
    ):
        got = straggler_of([dict(row) for row in rows])
        assert not isinstance(got, dict), "It returns a whole row, instead of its rank."
        longest = max(rows, key=lambda row: row["exposed"])["rank"]
        assert got != longest, f"For {which} it returns {got}. This rank waits longest for the others."
        assert got == right, f"For {which} it returns {got!r}. Another rank waits less for the others."

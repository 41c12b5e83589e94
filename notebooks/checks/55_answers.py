"""Check of notebook 55: what failures cost on so many GPUs."""

import math

DAYS, GPUS, FAILURES = 54, 16_384, 419  # of Llama 3's training
JOBS = (16_384, 60, 300), (1_024, 60, 600), (64, 60, 3_600)  # GPUs, s of a save, s of a restart


def priced(gpus, cost, restart, between=1.0, power=1, two=2.0, work=0.5, again=1.0):
    """Return interval (s) and the fraction lost; the other words are the ways in which an answer may go wrong."""
    mean = between * DAYS * 86_400 / FAILURES * (GPUS / gpus) ** power
    interval = math.sqrt(two * cost * mean)
    return interval, cost / interval + work * interval / mean + again * restart / mean


MISTAKES = [  # what was done, and the message
    ({"between": GPUS**-1}, "takes the whole cluster's time between failures for one GPU's"),
    ({"between": 3600**-1}, "counts the time between failures in hours, and a save in seconds"),
    ({"power": 0}, "gives the interval of Llama 3's 16,384 GPUs. Fewer GPUs fail less often"),
    ({"power": -1}, "lets fewer GPUs fail more often, not less"),
    ({"two": 1.0}, "leaves out the 2 under the root"),
    ({"work": 1.0}, "loses a whole interval in each failure; on average it is half of one"),
    ({"work": 0.0}, "leaves out the work that is done again"),
    ({"again": 0.0}, "leaves out the restarts"),
]


def check_55_1(plan):
    for job in JOBS:
        (interval, lost), right = plan(*job), priced(*job)
        said = f"For {job[0]:,} GPUs, saves of {job[1]} s and restarts of {job[2]} s, plan"
        for words, what in MISTAKES:
            wrong = priced(*job, **words)
            near = [math.isclose(a, b, rel_tol=0.03) for a, b in zip((interval, lost), wrong, strict=True)]
            assert wrong == right or not all(near), f"{said} {what}."
        assert math.isclose(interval, right[0], rel_tol=0.06), (
            f"{said} saves every {interval:.0f} s, not {right[0]:.0f}."
        )
        assert math.isclose(lost, right[1], rel_tol=0.1), (
            f"{said} loses {lost:.2%} of the time, not {right[1]:.2%}."
        )
    lost = [f"{plan(*job)[1]:.1%} on {job[0]:,} GPUs (restarts of {job[2]} s)" for job in JOBS[:2]]
    return f"With saves of 60 s, your second number is {' and '.join(lost)}."

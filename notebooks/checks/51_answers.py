"""Check of notebook 51: a search for the learning rate that is wide enough."""

from collections import Counter
from math import log2

# first rate, best rate, noise of the three seeds in steps, what is special, what a wrong answer missed
SEARCHES = [
    (
        0.025,
        0.05,
        (0, 0, 0),
        "Where the best rate is next to the first",
        "Try both neighbours of the first rate.",
    ),
    (
        0.0125,
        0.2,
        (0, 0, 0),
        "Where the best rate is 16 times the first",
        "Search on until both its neighbours are worse.",
    ),
    (0.4, 0.025, (0, 0, 0), "Where the best rate is a sixteenth of the first", "The way may lead down."),
    (0.05, 0.05, (0, 0, 0), "Where the first rate is the best", "Its neighbours are worse."),
    (0.05, 0.1, (30, 0, -15), "Where seed 0 alone has another best rate", "Average over the three seeds."),
    (0.1, 0.1, (-45, 0, 30), "Where two seeds disagree", "Average over the three seeds."),
]


def check_51_1(best_rate):
    for first, best, noise, where, missed in SEARCHES:
        calls = Counter()

        def steps_for(rate, seed, calls=calls, best=best, noise=noise):
            calls[rate, seed] += 1
            assert calls.total() < 300, "It tries rate after rate and doesn't end."
            assert seed in range(3), f"It asks for seed {seed!r}; there are 0, 1 and 2."
            octaves = log2(rate / best)
            return 40 + 20 * octaves**2 + noise[seed] * octaves

        got = best_rate(steps_for, first)
        assert got is not None, "It returns None."
        tried = sorted({rate for rate, _ in calls})
        said = f"{where}, it returns {got:g} after it has tried {', '.join(f'{rate:g}' for rate in tried)}"
        assert got in tried, f"{said}. Return one of the rates that were tried."
        assert got == best, f"{said}, and {best:g} is the best. {missed}"
        assert {best / 2, best * 2} <= {*tried}, (
            f"{said}. A rate is the best if both its neighbours have been tried."
        )
        twice = [rate for (rate, _), count in calls.items() if count > 1]
        assert not twice, (
            f"It's right, but it trains with rate {twice[0]:g} more than once. Each call is a whole run."
        )

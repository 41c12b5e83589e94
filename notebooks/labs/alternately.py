"""Time several ways of doing something one after the other, round by round, so that a busy moment meets all."""

import time

from mpdemo.measure.paired import ROUNDS, ratio


def seconds(ways) -> dict:
    """Return the seconds of each way (a name and a function) in each round, in changing order, after one warm-up."""
    times = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            begin = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - begin)
    return {name: found[1:] for name, found in times.items()}


def times_as_long(ways) -> dict:
    """Return how many times as long each way takes as the first one."""
    times = seconds(ways)
    first = next(iter(times.values()))
    return {name: ratio(own, first) for name, own in times.items()}

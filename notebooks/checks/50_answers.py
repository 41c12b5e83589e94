"""Checks of notebook 50: exposed communication, and how many nodes a long run should have."""

from math import isclose

QUEUES = [  # ready (ms), MiB, latency (ms), bandwidth (MiB/ms), exposed (ms), what is special
    ([10, 20, 30], [8, 8, 8], 1, 4, 3, "Where each bucket is done before the next is ready"),
    ([10, 12, 14], [20, 20, 4], 1, 4, 10, "Where buckets are ready faster than they are sent"),
    ([10, 12, 40], [20, 20, 4], 1, 4, 2, "Where a gap lets the network catch up"),
    ([25], [25], 0.5, 10, 3, "With a single bucket"),
]


def check_50_2(exposed):
    for ready, mib, latency, bandwidth, right, where in QUEUES:
        got = exposed([*ready], [*mib], latency, bandwidth)
        assert got is not None, "It returns None."
        if isclose(got, right):
            continue
        said = f"{where}, it returns {got:g} ms"
        assert got >= 0, f"{said}, less than none. No bucket is sent before it's ready."
        everything = f"{said}: all all-reduces together. Most of them hide behind the backward pass."
        assert not isclose(got, sum(latency + size / bandwidth for size in mib)), everything
        assert got < ready[-1] + right, f"{said}. Does it count from the last gradient?"
        assert got > right, f"{said}. The last bucket may have to wait until the one before it is sent."
        raise AssertionError(f"{said} and not {right:g}.")


SPEEDS = {1: 1000, 2: 1900, 4: 3500, 8: 6000, 16: 8000}  # images/s, by nodes
STARTUPS = dict.fromkeys(SPEEDS, 20)  # s
GROWING = {1: 20, 2: 40, 4: 80, 8: 160, 16: 320}
LARGE = {nodes: speed for nodes, speed in SPEEDS.items() if nodes > 1}  # of a model that needs two nodes
CACHES = {1: 1000, 2: 2200, 4: 4000, 8: 6400}  # two nodes have room for what one hasn't
DIP = {1: 1000, 2: 1900, 4: 2400, 8: 6400}  # 4 nodes shared their network with others
WORST = {1: 1000, 2: 900, 4: 1200}
# speeds, start-ups, images, least efficiency, right answer, what is special, what a wrong answer missed
CURVES = [
    (
        SPEEDS,
        STARTUPS,
        10**9,
        0.7,
        8,
        "For a run of 12 days on one node",
        "There the start-up is nothing, and 8 nodes have 75 %.",
    ),
    (
        SPEEDS,
        STARTUPS,
        200_000,
        0.7,
        4,
        "For a run of 220 s on one node",
        "There 20 s of start-up count: on 8 nodes all eight wait.",
    ),
    (
        SPEEDS,
        GROWING,
        2 * 10**6,
        0.7,
        4,
        "Where the start-up grows with the nodes",
        "Take the start-up of this number of nodes.",
    ),
    (
        LARGE,
        STARTUPS,
        10**9,
        0.75,
        8,
        "Without a run on one node",
        "Compare with the smallest run, which here has 2 nodes and efficiency 1.",
    ),
    (
        CACHES,
        STARTUPS,
        10**9,
        0.75,
        8,
        "Where 2 nodes are more than twice as fast",
        "Compare with the smallest run, not with the cheapest.",
    ),
    (
        DIP,
        STARTUPS,
        10**9,
        0.7,
        8,
        "Where 4 nodes are bad and 8 are good",
        "It's the largest that is good enough, not the last before a bad one.",
    ),
    (
        WORST,
        STARTUPS,
        10**9,
        0.7,
        1,
        "Where no other number is good enough",
        "The smallest run always has efficiency 1.",
    ),
]


def check_50_3(nodes_for):
    for speeds, startups, images, least, right, where, missed in CURVES:
        try:
            got = nodes_for(dict(speeds), dict(startups), images, least)
        except KeyError as error:
            raise AssertionError(
                f"{where}, it asks for {error} nodes, which weren't measured. {missed}"
            ) from None
        assert got is not None, "It returns None."
        assert got in speeds, f"{where}, it returns {got!r}, not one of the measured numbers {[*speeds]}."
        assert got == right, f"{where}, it returns {got}, not {right}. {missed}"

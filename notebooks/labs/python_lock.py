"""How long threads need that run one model's replicas at the same time, beside a single thread."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from mpdemo.labs import alternately


def times_as_long(model, images, counts, passes=20):
    """Return, for each number of replicas, the ratio of its forward passes' time to one replica's."""
    threads = ThreadPoolExecutor(max(counts), initializer=torch.set_num_threads, initargs=(1,))
    replicas = [copy.deepcopy(model) for _ in range(max(counts))]

    def at_the_same_time(count):
        for _ in range(passes):
            list(threads.map(lambda replica: replica(images), replicas[:count]))

    found = alternately.times_as_long({count: partial(at_the_same_time, count) for count in (1, *counts)})
    threads.shutdown()
    return {count: found[count] for count in counts}

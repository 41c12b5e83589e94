"""How long threads need that run one model's replicas at the same time, beside a single thread."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from mpdemo.measure.paired import ROUNDS, ratio


def times_as_long(model, images, counts, passes=20):
    """Return, for each number of replicas, the ratio of its forward passes' time to one replica's."""
    threads = ThreadPoolExecutor(max(counts), initializer=torch.set_num_threads, initargs=(1,))
    replicas = [copy.deepcopy(model) for _ in range(max(counts))]
    seconds = {count: [] for count in (1, *counts)}
    for _ in range(ROUNDS):
        for count, row in seconds.items():
            begin = time.perf_counter()
            for _ in range(passes):
                list(threads.map(lambda replica: replica(images), replicas[:count]))
            row.append(time.perf_counter() - begin)
    threads.shutdown()
    return {count: ratio(seconds[count], seconds[1]) for count in counts}

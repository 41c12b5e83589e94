"""The loader against the device: the time of a training step with 0, 1, 2, ... loader processes.

Part of the job of notebooks/labs/single_device.py. Taught in notebooks/01_single_device.ipynb.
"""

import time
from dataclasses import replace

from torch.utils.data import Dataset

from mpdemo import data
from mpdemo.compare import model_and_batch
from mpdemo.settings import Settings
from mpdemo.trial import Trial
from mpdemo.world import clock

CONVNET = Settings(rung="single", model="convnet", batch_size=128)
ALONE = 7  # steps of a measurement without a loader


class RemoteImages(Dataset):
    """Images that come one by one from a slow file system: each takes `seconds`, in which no core works."""

    def __init__(self, dataset, seconds):
        self.dataset, self.seconds = dataset, seconds

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.dataset[index]


def loading(world, workers=(0, 1, 2, 4), seconds_per_image=0.001):
    """Return the time of a step of the ConvNet with 0, 1, ... loader processes, and of its two parts alone.

    The device's own time, on a batch that is there, is a lower limit for all others: the least of several measurements.
    """
    digits, trial = data.load("digits"), Trial(CONVNET, world, *model_and_batch(CONVNET))
    slow = replace(digits, train=RemoteImages(digits.train, seconds_per_image))
    load = mean_seconds(batches(slow, 0), lambda batch: None, world.device)
    steps, alone = {}, []
    for count in workers:
        steps[count] = mean_seconds(batches(slow, count), trial.step, world.device)
        alone.append(mean_seconds(iter(range(ALONE)), lambda _: trial.step(), world.device))
    return {"load": load, "device": min(alone), "workers": steps}


def batches(dataset, workers):
    """Return the batches of one epoch, from this many loader processes (0: from this process)."""
    loaders = data.Loaders(dataset, CONVNET.batch_size, workers=workers)
    loaders.start_epoch(0)
    return iter(loaders.train)


def mean_seconds(batches, work, device, warmup=2):
    """Return the time per batch, to get it and to work on it; the first ones are left out."""
    for _ in range(warmup):
        work(next(batches))
    begin, count = clock.now(device), 0
    for batch in batches:
        work(batch)
        count += 1
    return (clock.now(device) - begin) / count

"""How many images per second a core reads: the usual loader, torchvision's v2 on bytes, and this package's.

    python -m mpdemo.labs.decoding runs/08_loader

Writes some photo-like JPEG files into the folder, reads them with each loader alternately, and writes ``summary.json``:
images per second of one core's time, and with 0, 1, 2, ... loader processes. Taught in notebooks/08_scaling.ipynb.
"""

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from mpdemo.data import Loaders, SplitDataset
from mpdemo.data.datasets import PIXELS, SeededAugmentation
from mpdemo.data.images import augmented
from mpdemo.data.loaders import keep_freed_memory
from mpdemo.training.log import RunLog
from mpdemo.world.launch import end

IMAGES, WIDTH, HEIGHT, QUALITY = 24, 500, 375, 85  # files of about 90 kB, as the photos of ImageNet
SIZE, BATCH, ROUNDS = 224, 12, 5
REPEATS, EPOCHS = 6, 2  # with loader processes: the files so many times over, and so often
PIXEL = PIXELS["imagenet"]
USUAL = [transforms.RandomResizedCrop(SIZE), transforms.ToTensor(), transforms.Normalize(*PIXEL)]
ON_BYTES = [v2.PILToTensor(), v2.RandomResizedCrop(SIZE), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*PIXEL)]


def loaders(folder, workers=0, repeats=1) -> dict:
    """Return an iterable over batches for each way to read the files, each of them so many times."""

    def repeated(files):
        return Subset(files, list(range(len(files))) * repeats)

    def usual(steps):  # PIL reads, and each image is transformed
        files = repeated(ImageFolder(folder, transforms.Compose(steps)))
        return DataLoader(files, BATCH, shuffle=True, num_workers=workers)

    train = SeededAugmentation(repeated(ImageFolder(folder, loader=partial(augmented, size=SIZE))), seed=0)
    ours = Loaders(SplitDataset(train, train, 2, 3, PIXEL), BATCH, workers=workers)  # normalises a batch as a whole
    return {"PIL, float transforms": usual(USUAL), "PIL, v2 on bytes": usual(ON_BYTES), "this package": ours.train}


def write_photos(folder):
    """Write JPEG files with a photo's statistics: noise whose amplitude falls with its frequency."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None])
    frequency[0, 0] = 1
    for number in range(IMAGES):
        path = folder / f"class{number % 2}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        layers = []
        for power in (1.1, 1.3, 1.3, 1.3):  # brightness, and three colours
            noise = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
            layer = np.fft.irfft2(noise / frequency**power, (HEIGHT, WIDTH))
            layers.append(layer / layer.std())
        pixels = np.stack([layers[0] + 0.4 * colour for colour in layers[1:]], -1)
        Image.fromarray((128 + 55 * pixels).clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)


def images_per_second(batches, clock) -> float:
    """Read all batches once; return the images per second of a clock."""
    begin, count = clock(), 0
    for images, _ in batches:
        count += len(images)
    return count / (clock() - begin)


def measure(folder, workers) -> dict:
    """Measure the loaders alternately: images per second of a core's time, and by number of loader processes."""
    alone = loaders(folder)
    core, names = {name: [] for name in alone}, list(alone)[::2]
    for number in range(-1, ROUNDS):  # the first round is not counted
        for name, batches in alone.items():
            rate = images_per_second(batches, time.process_time)
            core[name] += [rate] * (number >= 0)
    helped = {(name, count): loaders(folder, count, REPEATS)[name] for count in workers for name in names}
    rates = {key: [] for key in helped}
    for _ in range(EPOCHS):
        for key, batches in helped.items():
            others = iter(batches)
            next(others)  # for the first batch the loader processes start
            rates[key].append(images_per_second(others, time.perf_counter))
    return {"core": core, "workers": {name: {n: median(rates[name, n]) for n in workers} for name in names}}


def main(out):
    """Write the files, measure, write the result."""
    folder = Path(out) / "photos"
    torch.set_num_threads(1)
    keep_freed_memory()  # for all loaders alike, as in this package's loader processes
    cores = len(os.sched_getaffinity(0))
    write_photos(folder)
    size = sum(path.stat().st_size for path in folder.glob("*/*")) / IMAGES
    result = measure(folder, range(min(cores, 4) + 1))
    shutil.rmtree(folder)
    RunLog(out, True).finish(result | {"file_bytes": round(size), "cores": cores})


if __name__ == "__main__":
    end(main(sys.argv[1]))

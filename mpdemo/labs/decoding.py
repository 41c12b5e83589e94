"""How many images per second a core reads: the usual loader of PIL images, torchvision's decoder, and this package's.

    python -m mpdemo.labs.decoding runs/08_loader

Writes some photo-like JPEG files into the folder, reads them with each loader in turn, round after round, and writes
``summary.json``: images per second of one core's time, and with 1, 2, ... loader processes. Taught in
notebooks/08_scaling.ipynb. The usual loader is that of the course material from which this course grew.
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
from torchvision.io import decode_jpeg, read_file
from torchvision.transforms import v2

from mpdemo.data import Loaders, SplitDataset
from mpdemo.data.datasets import PIXELS, SeededAugmentation
from mpdemo.data.images import augmented
from mpdemo.data.loaders import keep_freed_memory
from mpdemo.log import RunLog
from mpdemo.world.launch import end

IMAGES, WIDTH, HEIGHT, QUALITY = 24, 500, 375, 85  # files of about 90 kB, as the photos of ImageNet
SIZE, BATCH, ROUNDS = 224, 12, 5
REPEATS, EPOCHS = 6, 2  # with loader processes: the files so many times over, and so often
PIL, V2, OURS = "PIL, float transforms", "decode_jpeg, v2 on bytes", "this package"


def write_photos(folder):
    """Write JPEG files with a photo's statistics: noise whose amplitude falls with its frequency."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None])
    frequency[0, 0] = 1
    for number in range(IMAGES):
        path = Path(folder) / f"class{number % 2}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey, *colours = (
            np.fft.irfft2(noise(rng, frequency.shape) / frequency**power, (HEIGHT, WIDTH))
            for power in (1.1, 1.3, 1.3, 1.3)
        )
        pixels = np.stack([grey / grey.std() + 0.4 * colour / colour.std() for colour in colours], -1)
        Image.fromarray((128 + 55 * pixels).clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)


def noise(rng, shape):
    """Complex numbers of random phases and sizes."""
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def usual_loader(folder, workers=0, repeats=1):
    """Return an iterable over batches: PIL, torchvision's first transforms, each image normalised by itself."""
    last = [transforms.ToTensor(), transforms.Normalize(*PIXELS["imagenet"])]
    files = ImageFolder(folder, transforms.Compose([transforms.RandomResizedCrop(SIZE), *last]))
    return DataLoader(repeated(files, repeats), BATCH, shuffle=True, num_workers=workers)


def v2_loader(folder, workers=0, repeats=1):
    """Return an iterable over batches: torchvision's decoder and v2 transforms on bytes, each image normalised."""
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*PIXELS["imagenet"])]
    reader = v2.Compose([read_file, partial(decode_jpeg, mode="RGB"), v2.RandomResizedCrop(SIZE), *last])
    return DataLoader(repeated(ImageFolder(folder, loader=reader), repeats), BATCH, shuffle=True, num_workers=workers)


def our_loader(folder, workers=0, repeats=1):
    """Return an iterable over batches of this package, normalised by the process that asks for them."""
    files = ImageFolder(folder, loader=partial(augmented, size=SIZE))
    train = SeededAugmentation(repeated(files, repeats), seed=0)
    return Loaders(SplitDataset(train, train, 2, 3, PIXELS["imagenet"]), BATCH, workers=workers).train


def repeated(files, repeats):
    """Return a data set that holds each file several times."""
    return Subset(files, list(range(len(files))) * repeats)


LOADERS = {PIL: usual_loader, V2: v2_loader, OURS: our_loader}


def images_per_second(batches, clock) -> float:
    """Read all batches once; return the images per second of a clock."""
    begin, count = clock(), 0
    for images, _ in batches:
        count += len(images)
    return count / (clock() - begin)


def after_the_first(batches):
    """Take the first batch, for which the loader processes start; return an iterator over the others."""
    others = iter(batches)
    next(others)
    return others


def measure(folder, workers) -> dict:
    """Measure the loaders in turn.

    Returns
    -------
    dict
        ``core``: by loader the images per second of one core's time, each round; ``workers``: of the first and the last
        loader, by number of loader processes, images per second by the clock, from the first batch on.
    """
    alone = {name: loader(folder) for name, loader in LOADERS.items()}
    core = {name: [] for name in LOADERS}
    for number in range(-1, ROUNDS):  # the first round is not counted
        for name, batches in alone.items():
            rate = images_per_second(batches, time.process_time)
            core[name] += [rate] * (number >= 0)
    helped = {(name, count): LOADERS[name](folder, count, REPEATS) for count in workers for name in (PIL, OURS)}
    rates = {key: [] for key in helped}
    for _ in range(EPOCHS):
        for key, batches in helped.items():
            rates[key].append(images_per_second(after_the_first(batches), time.perf_counter))
    table = {name: {count: median(rates[name, count]) for count in workers} for name in (PIL, OURS)}
    return {"core": core, "workers": table}


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
    RunLog(out, active=True).finish(result | {"file_bytes": round(size), "cores": cores})


if __name__ == "__main__":
    end(main(sys.argv[1]))

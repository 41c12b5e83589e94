"""Real JPEG files for the tests: class folders of coloured digits on noise."""

from pathlib import Path

import numpy as np
from PIL import Image

from mpdemo.paths import root


def make_jpeg_folder(path, classes=10, images=24, size=96, seed=0):
    """Write train/CLASS/*.jpg, `images` per class, and a quarter as many val/CLASS/*.jpg, of `size` pixels per side."""
    stored = np.load(root() / "mpdemo/data/digits.npz")
    rng = np.random.default_rng(seed)
    for split, count in (("train", images), ("val", max(1, images // 4))):
        for digit in range(classes):
            folder = Path(path) / split / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            chosen = rng.choice(np.flatnonzero(stored["labels"] == digit), count)
            for number, index in enumerate(chosen):
                mask = Image.fromarray(stored["images"][index] * 15).resize((size, size))
                noise = rng.integers(0, 100, (size, size, 3), dtype=np.uint8)
                colour = Image.new("RGB", (size, size), tuple(int(c) for c in rng.integers(120, 256, 3)))
                Image.composite(colour, Image.fromarray(noise), mask).save(folder / f"{number:04d}.jpg", quality=90)

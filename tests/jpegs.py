"""Real JPEG files for the tests: class folders of coloured patches."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def make_jpeg_folder(path, classes=10, images=24, size=96):
    """Write train/CLASS/*.jpg, `images` per class, and a quarter as many val/CLASS/*.jpg, of `size` pixels per side."""
    rng = np.random.default_rng(0)
    for split, count in (("train", images), ("val", max(1, images // 4))):
        for label in range(classes):
            folder = Path(path) / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                patches = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
                patches.resize((size, size), Image.BICUBIC).save(folder / f"{number:04d}.jpg", quality=90)


@pytest.fixture(scope="session")
def jpegs(tmp_path_factory):
    """A folder of 10 classes, with 40 images to train on (5 steps per epoch in batches of 8) and 10 to validate on."""
    path = tmp_path_factory.mktemp("jpegs")
    make_jpeg_folder(path, images=4, size=72)
    return path

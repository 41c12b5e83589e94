"""Image files: class folders of them, and what is decoded, cropped and resized of each.

Pixels stay bytes until a batch of them is normalised on the device (`SplitDataset.prepare`). Taught in
notebooks/56_streams.ipynb.
"""

import os
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from mpdemo.errors import UserError, error_line
from mpdemo.world.say import log, own_rank

# what the names of images end in
READ = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")


class ClassFolders(Dataset):
    """Images in one folder per class, as torchvision's ImageFolder, but no hidden folder, and every folder once.

    So a link that leads back to the data folder, to a class or to what was seen already is not followed.
    """

    def __init__(self, folder, reader):
        self.reader = reader
        self.left_out = Counter()  # by ending
        top = Path(folder).resolve()
        self.seen = {str(path) for path in (top, *top.parents)}
        folders = self.new_folders(visible(folder))
        self.classes = [os.path.basename(path) for path in folders]
        self.samples = [
            (image, label) for label, path in enumerate(folders) for image in self.images_below(path)
        ]
        self.targets = [label for _, label in self.samples]
        if without := set(range(len(folders))) - set(self.targets):
            raise UserError(
                f"class folder {folders[min(without)]} holds no image ({', '.join(READ)}); remove it"
            )

    def new_folders(self, paths) -> list[str]:
        """Return the folders among some paths, but those that, be it through a link, were seen already."""
        found = []
        for path in sorted(paths, key=lambda path: (os.path.islink(path), path)):
            if os.path.isdir(path) and (real := os.path.realpath(path)) not in self.seen:
                self.seen.add(real)
                found.append(path)
        return sorted(found)

    def images_below(self, folder):
        """Yield the images of a folder, then those of the folders in it; count the other files."""
        others = []
        for path in visible(folder):
            if ending(path) in READ and os.path.isfile(path):  # no pipe, which would wait forever
                yield path
            else:
                others.append(path)
        self.left_out.update(ending(path) for path in others if not os.path.isdir(path))
        for inner in self.new_folders(others):
            yield from self.images_below(inner)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.reader(path), label


def visible(folder) -> list[str]:
    """Return the paths in a folder, in order, but those of hidden files and folders."""
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name[0] != "."]


def ending(path) -> str:
    """Return what the name of a file ends in."""
    return os.path.splitext(path)[1].lower()


def tell_left_out(folder, left_out):
    """Say once how many files are not read, and what their names end in."""
    if left_out and own_rank() in (None, "0"):
        kinds = ", ".join(
            f"{count} {kind or 'without an ending'}" for kind, count in left_out.most_common(5)
        )
        log.warning("%d files in %s are not read: %s", left_out.total(), folder, kinds)


def augmented(path, size) -> torch.Tensor:
    """Read an image file for training, as (3, size, size) bytes: a random part, every second time mirrored."""
    from torchvision.transforms import v2  # loaded late: it takes a second

    return v2.RandomHorizontalFlip()(v2.RandomResizedCrop(size)(pixels(path, size)))


def plain(path, size) -> torch.Tensor:
    """Read an image file for validation, as (3, size, size) bytes: its middle, 7/8 of the shorter side."""
    from torchvision.transforms.v2 import functional as F

    image = pixels(path, size)
    side = max(1, round(min(image.shape[1:]) * 0.875))
    return F.resize(F.center_crop(image, [side, side]), [size, size])


def quiet(category):
    """Hide the warnings of a category."""
    return warnings.catch_warnings(action="ignore", category=category)


def pixels(path, size) -> torch.Tensor:
    """Read an image file as RGB bytes, (3, H, W); one that is far larger than `size` may come at 1/2, 1/4 or 1/8.

    PIL's warnings about odd metadata or very many pixels are hidden: it reads such a file all the same.
    """
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        with quiet(UserWarning), quiet(Image.DecompressionBombWarning), Image.open(path) as image:
            # a JPEG alone: random crops begin at a quarter of a side
            image.draft("RGB", (4 * size, 4 * size))
            # by older PILs
            if image.mode.startswith("I;16") or image.mode == "I" and image.format in ("PNG", "PPM"):
                # PIL would cut it off at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                what = "has 32 bits per pixel, and nothing says what is white; save it with 8 or 16"
                raise UserError(f"image file {path} {what}")
            return pil_to_tensor(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what PIL raises
        raise UserError(
            f"image file {path} cannot be read ({error_line(error)}); replace it or remove it"
        ) from None

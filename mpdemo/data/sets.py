"""The data sets: real images, normalised, split into training and validation.

``digits`` ships with the package (mpdemo/data/README.md says whose they are), so that a compute node without
internet can train. MNIST and ImageNet are read by torchvision from a folder; ``folder`` is any set of class folders
with images. Nothing is ever downloaded. Taught in notebooks/01_single_device.ipynb.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from mpdemo.errors import UserError

# mean and standard deviation of the training images' pixels (0 to 1), a value a channel
PIXELS = {"digits": ((0.3053,), (0.3245,)), "mnist": ((0.1307,), (0.3081,))}
IMAGENET_PIXELS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LAYOUTS = {
    "mnist": "PATH/MNIST/raw/train-images-idx3-ubyte and its three companions",
    "imagenet": "PATH/ILSVRC2012_devkit_t12.tar.gz or PATH/meta.bin, PATH/train/n01440764/*.JPEG ... and PATH/val/...",
    "folder": "PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, or PATH/CLASS/*.jpg",
}


@dataclass
class Data:
    """A data set, split: what to train on and what to validate on. Samples are (image (C, S, S), label)."""

    train: Dataset
    validation: Dataset
    classes: int
    channels: int


class PerSample(Dataset):
    """Random augmentation that depends on the seed, the epoch and the image, and on nothing else.

    So image 17 of epoch 3 is cropped alike in a run on one device, in one on four, and in a resumed one.
    """

    def __init__(self, dataset, seed):
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self.seed * 1_000_003 + self.epoch) * 10_000_019 + index)
            return self.dataset[index]


def load(dataset, path=None, image_size=28, seed=0) -> Data:
    """Open a data set.

    Parameters
    ----------
    dataset : {"digits", "mnist", "imagenet", "folder"}
    path : str, optional
        Its folder. Default: ``MPDEMO_DATA``; for imagenet also ``DSDIR/imagenet/RawImages`` (Jean Zay).
    image_size : int
        Pixels a side of the images that come out.
    seed : int
        Of the augmentation and of the split into training and validation images.

    Raises
    ------
    UserError
        A folder that is missing, empty or laid out otherwise.
    """
    if dataset == "digits":
        return _digits(image_size)
    path = path or os.environ.get("MPDEMO_DATA")
    if path is None and dataset == "imagenet" and "DSDIR" in os.environ:
        path = Path(os.environ["DSDIR"]) / "imagenet" / "RawImages"
    if path is None:
        raise UserError(f"--dataset {dataset} needs --data PATH or MPDEMO_DATA; expected: {LAYOUTS[dataset]}")
    path = Path(path)
    if not path.is_dir() or not any(path.iterdir()):
        what = "is empty" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise UserError(f"data folder {path} {what}; expected: {LAYOUTS[dataset]}")
    opener = {"mnist": _mnist, "imagenet": _imagenet, "folder": _folder}[dataset]
    try:
        return opener(path, image_size, seed)
    except (RuntimeError, OSError, ImportError) as error:  # what torchvision raises; it reads the devkit with scipy
        reason = str(error).splitlines()[0]
        raise UserError(f"data folder {path} is not a {dataset} set ({reason}); expected: {LAYOUTS[dataset]}") from None


def _digits(image_size) -> Data:
    """1,536 training and 261 validation images: 1,536 divides into batches of 64, 96, 128, 192, 256, 384, 512."""
    stored = np.load(Path(__file__).with_name("digits.npz"))
    images = torch.from_numpy(stored["images"]).float().div(16).unsqueeze(1)  # (1797, 1, 8, 8), 0 to 1
    images = torch.nn.functional.interpolate(images, (image_size, image_size), mode="bilinear")
    mean, std = PIXELS["digits"]
    images, labels = (images - mean[0]) / std[0], torch.from_numpy(stored["labels"]).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1536], order[1536:]
    return Data(
        TensorDataset(images[train], labels[train]), TensorDataset(images[validation], labels[validation]), 10, 1
    )


def _transform(image_size, pixels, augment):
    """Decoded image -> normalised tensor (C, S, S)."""
    from torchvision import transforms as t

    size = [t.RandomResizedCrop(image_size), t.RandomHorizontalFlip()]
    if not augment:
        size = [t.Resize(round(image_size / 0.875)), t.CenterCrop(image_size)]
    return t.Compose([*size, t.ToTensor(), t.Normalize(*pixels)])


def _mnist(path, image_size, seed) -> Data:
    from torchvision import transforms as t
    from torchvision.datasets import MNIST

    transform = t.Compose([t.Resize(image_size), t.ToTensor(), t.Normalize(*PIXELS["mnist"])])
    train, validation = (MNIST(path, train=flag, transform=transform, download=False) for flag in (True, False))
    return Data(train, validation, 10, 1)


def _imagenet(path, image_size, seed) -> Data:
    from torchvision.datasets import ImageNet

    train = ImageNet(path, split="train", transform=_transform(image_size, IMAGENET_PIXELS, augment=True))
    validation = ImageNet(path, split="val", transform=_transform(image_size, IMAGENET_PIXELS, augment=False))
    return Data(PerSample(train, seed), validation, 1000, 3)


def _folder(path, image_size, seed) -> Data:
    """Class folders; without train/ and val/ every tenth image is kept for validation."""
    from torchvision.datasets import ImageFolder

    there = [name for name in ("train", "val") if (path / name).is_dir()]
    if len(there) == 1:
        raise UserError(f"data folder {path} has {there[0]}/ only; expected: {LAYOUTS['folder']}")
    split = bool(there)
    sources = (path / "train", path / "val") if split else (path, path)
    train, validation = (
        ImageFolder(source, transform=_transform(image_size, IMAGENET_PIXELS, augment))
        for source, augment in zip(sources, (True, False), strict=True)
    )
    if train.classes != validation.classes:
        raise UserError(f"{path}/train and {path}/val must hold the same class folders; expected: {LAYOUTS['folder']}")
    classes = len(train.classes)
    if classes < 2:
        raise UserError(f"data folder {path} has one class, {train.classes[0]!r}; expected: {LAYOUTS['folder']}")
    if not split:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        kept = max(1, len(order) // 10)
        train, validation = Subset(train, order[kept:]), Subset(validation, order[:kept])
    return Data(PerSample(train, seed), validation, classes, 3)


def make_jpeg_folder(path, classes=10, images=24, size=96, seed=0):
    """Write a small set of real JPEG files in class folders: coloured digits on noise, for the decode-and-augment path.

    Parameters
    ----------
    path : str or Path
        Gets train/CLASS/*.jpg with `images` files a class and val/CLASS/*.jpg with a quarter as many.
    classes : int
        1 to 10: the digits.
    size : int
        Pixels a side.
    """
    from PIL import Image

    stored = np.load(Path(__file__).with_name("digits.npz"))
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

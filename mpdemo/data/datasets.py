"""The data sets: real images, split into training and validation.

``digits`` ships with the package (mpdemo/data/README.md names its authors), so that a compute node without internet can
train. MNIST and ImageNet are read by torchvision from a folder; ``folder`` is any set of class folders with images.
Nothing is ever downloaded. Taught in notebooks/12_one_step.ipynb.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from mpdemo.data.images import ClassFolders, augmented, plain, tell_left_out
from mpdemo.errors import UserError

# mean and standard deviation of the training images' pixels (0 to 1), one value per channel
PIXELS = {
    "digits": ((0.3053,), (0.3245,)),
    "mnist": ((0.1307,), (0.3081,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
LAYOUTS = {
    "mnist": "PATH/MNIST/raw/train-images-idx3-ubyte and its three companions",
    "imagenet": "PATH/ILSVRC2012_devkit_t12.tar.gz or PATH/meta.bin, PATH/train/n01440764/*.JPEG ... and PATH/val/...",
    "folder": "PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, or PATH/CLASS/*.jpg",
}


@dataclass
class SplitDataset:
    """A data set in two parts; a sample is (image, label).

    Images, (C, S, S), that are read from files are still bytes: `Loaders` normalise them batch by batch.
    """

    train: Dataset
    validation: Dataset
    classes: int
    channels: int
    # mean and standard deviation of bytes' colours
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """Return a batch of samples' images as a model takes it, (B, C, S, S), float32, on the device where it is."""
        if self.pixels is None or images.dtype != torch.uint8:
            return images
        mean, std = (
            255 * torch.tensor(values, device=images.device).view(-1, 1, 1) for values in self.pixels
        )
        return images.to(torch.float32).sub_(mean).div_(std)


class SeededAugmentation(Dataset):
    """A data set whose random augmentation depends on the seed, the epoch and the image, and on nothing else.

    So image 17 of epoch 3 is cropped in the same way in a run on one device and on four.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        # the CPU's alone: to seed all devices takes ten times as long
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                ((self.seed * 1_000_003 + self.epoch) * 10_000_019 + index) % 2**63
            )
            return self.dataset[index]


def load(dataset: str, path: str | Path | None = None, image_size: int = 28, seed: int = 0) -> SplitDataset:
    """Open a data set.

    Parameters
    ----------
    dataset : {"digits", "mnist", "imagenet", "folder"}
    path : str, optional
        Its folder. Default: ``MPDEMO_DATA``; for imagenet also ``DSDIR/imagenet/RawImages`` (Jean Zay).
    image_size : int
        Pixels per side of the images it returns.
    seed : int
        Of the augmentation and of the split into training and validation images.

    Returns
    -------
    SplitDataset
        Its samples are images (C, image_size, image_size) and labels: those of digits and mnist float32 and
        normalised, the others bytes.

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
        raise UserError(
            f"--dataset {dataset} needs --data PATH or MPDEMO_DATA; expected: {LAYOUTS[dataset]}"
        )
    path = Path(path)
    opener = {"mnist": _mnist, "imagenet": _imagenet, "folder": _folder}[dataset]
    try:
        if not path.exists() or not any(path.iterdir()):
            problem = "is empty" if path.exists() else "does not exist"
            raise UserError(f"data folder {path} {problem}; expected: {LAYOUTS[dataset]}")
        return opener(path, image_size, seed)
    except (
        RuntimeError,
        OSError,
        ImportError,
    ) as error:  # what torchvision raises; it reads the devkit with scipy
        reason = str(error).splitlines()[0]
        raise UserError(
            f"data folder {path} is not a {dataset} set ({reason}); expected: {LAYOUTS[dataset]}"
        ) from None


def _digits(image_size: int) -> SplitDataset:
    """1,536 training and 261 validation images: 1,536 divides into batches of 64, 96, 128, 192, 256, 384, 512."""
    stored = np.load(Path(__file__).with_name("digits.npz"))
    images = torch.from_numpy(stored["images"]).float().div(16).unsqueeze(1)  # (1797, 1, 8, 8), 0 to 1
    images = torch.nn.functional.interpolate(images, (image_size, image_size), mode="bilinear")
    mean, std = PIXELS["digits"]
    images = (images - mean[0]) / std[0]
    labels = torch.from_numpy(stored["labels"]).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, validation = (TensorDataset(images[part], labels[part]) for part in (order[:1536], order[1536:]))
    return SplitDataset(train, validation, classes=10, channels=1)


def _mnist(path: Path, image_size: int, seed: int) -> SplitDataset:
    from torchvision import transforms as t
    from torchvision.datasets import MNIST

    transform = t.Compose([t.Resize(image_size), t.ToTensor(), t.Normalize(*PIXELS["mnist"])])
    train, validation = (
        MNIST(path, train=flag, transform=transform, download=False) for flag in (True, False)
    )
    return SplitDataset(train, validation, classes=10, channels=1)


def _imagenet(path: Path, image_size: int, seed: int) -> SplitDataset:
    from torchvision.datasets import ImageNet

    train = ImageNet(path, "train", loader=partial(augmented, size=image_size))
    validation = ImageNet(path, "val", loader=partial(plain, size=image_size))
    same_classes(path, "imagenet", train.wnids, validation.wnids)
    return SplitDataset(SeededAugmentation(train, seed), validation, 1000, 3, PIXELS["imagenet"])


def _folder(path: Path, image_size: int, seed: int) -> SplitDataset:
    """Class folders; without train/ and val/ one image in ten is kept for validation."""
    is_split = (path / "train").is_dir() or (path / "val").is_dir()
    train = ClassFolders(path / "train" if is_split else path, partial(augmented, size=image_size))
    validation = ClassFolders(path / "val" if is_split else path, partial(plain, size=image_size))
    tell_left_out(path, train.left_out + validation.left_out if is_split else train.left_out)
    same_classes(path, "folder", train.classes, validation.classes)
    classes = len(train.classes)
    if classes < 2:
        raise UserError(
            f"data folder {path} does not hold two or more class folders; expected: {LAYOUTS['folder']}"
        )
    if not is_split:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        count = max(1, len(order) // 10)
        train, validation = Subset(train, order[count:]), Subset(validation, order[:count])
    return SplitDataset(SeededAugmentation(train, seed), validation, classes, 3, PIXELS["imagenet"])


def same_classes(path: Path, dataset: str, train: list[str], validation: list[str]) -> None:
    """Refuse class folders that train/ and val/ do not share, and name some of them."""
    alone = sorted({*train} ^ {*validation}, key=lambda name: (name.lower(), name))
    if alone:
        folders = [f"{'train' if name in train else 'val'}/{name}" for name in alone]
        more = f" and {len(folders) - 5} more" if len(folders) > 5 else ""
        case = " (names are case-sensitive)" if len({name.lower() for name in alone}) < len(alone) else ""
        wrong = f"class folders that train/ and val/ do not share: {', '.join(folders[:5])}{more}{case}"
        raise UserError(f"data folder {path} has {wrong}; expected: {LAYOUTS[dataset]}")

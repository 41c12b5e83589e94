"""Train ResNet-50 on ImageNet: the loop, checkpoints and stop are train_ddp.py's, beside this file.

One machine:     torchrun --standalone --nproc-per-node=4 train_imagenet.py NAME --data PATH
Several nodes:   sbatch train.sbatch, with this line's end in its last line
NAME is how the checkpoints' names begin. PATH has train/ and val/, and both have a folder of images
per class; without --data it is $DSDIR/imagenet/RawImages, as on Jean Zay."""

import argparse
import os
import sys
from pathlib import Path

import torch
from torchvision.datasets import ImageFolder
from torchvision.models import resnet50
from torchvision.transforms import v2

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("name", nargs="?", default="train_imagenet")
parser.add_argument("--data", default=f"{os.environ.get('DSDIR', '.')}/imagenet/RawImages")
args = parser.parse_args()
sys.argv[1:] = [args.name]  # which train_ddp.py reads
import train_ddp as ddp  # noqa: E402

ddp.EPOCHS, ddp.BATCH, ddp.WORKERS = 90, 256, 8  # of all processes; per process
ddp.RATE, ddp.WARM_UP, ddp.SAVE_STEPS = 0.1, 25_000, 5_000  # the rate for this batch
SIZE = 224  # pixels per side
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours
LAST = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def make_dataset():
    ways = {  # train_ddp.py seeds the random numbers by epoch and image
        "train": [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()],
        "val": [v2.Resize(SIZE * 8 // 7), v2.CenterCrop(SIZE)],
    }
    try:
        train, check = (
            ImageFolder(Path(args.data, name), v2.Compose(way + LAST)) for name, way in ways.items()
        )
    except OSError as error:  # no such folder, or no image of a class
        ddp.end(f"--data {args.data} is not laid out like ImageNet ({ddp.short(error)})")
    if train.classes != check.classes:
        ddp.end(f"--data {args.data}: train/ and val/ have different classes")
    return train, check


def make_model():
    count = len(os.listdir(Path(args.data, "train")))
    return resnet50(num_classes=count).to(memory_format=torch.channels_last)  # faster on GPUs


ddp.make_dataset, ddp.make_model = make_dataset, make_model
if __name__ == "__main__":
    ddp.main()

"""Six measured runs of a real cluster: what more devices brought and cost.

ResNet-50, ten epochs of ImageNet, on JUWELS Booster with four GPUs per node; from a course of the Jülich
Supercomputing Centre (2023). The seconds are those of ``time srun``. A GPU had 256 images of a step on one node, and
128 on several. Taught in notebooks/50_how_many.ipynb.
"""

from typing import NamedTuple


class Run(NamedTuple):
    """One measured run: on how many devices, for how many seconds, with how many images per step (all devices)."""

    devices: int
    seconds: float
    batch: int


IMAGES = 10 * 1_281_167
RUNS = tuple(
    Run(devices, 60 * minutes + seconds, devices * (256 if devices <= 4 else 128))
    for devices, minutes, seconds in (
        (1, 342, 11.864),
        (4, 89, 15.923),
        (16, 24, 48.169),
        (32, 13, 10.722),
        (64, 6, 56.457),
        (128, 4, 48.313),
    )
)

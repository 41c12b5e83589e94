"""Image files, read as fast as one core can: decode, crop and resize in whole numbers, normalise whole batches.

Pixels stay bytes up to `normalise`, which handles a batch at once, on the device; and a file far larger than the crop
needs is decoded at 1/2, 1/4 or 1/8 of its size. Taught in notebooks/08_scaling.ipynb.
"""

import io
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.nn.functional import interpolate

from mpdemo.errors import UserError

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what PIL raises
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop: its share of the image, its width over its height


def augmented(path, size) -> torch.Tensor:
    """Read an image file for training, as (size, size, 3) bytes: a random part, every second time mirrored."""
    image = read(path, size, random_box)
    return image.flip(1) if torch.rand(()) < 0.5 else image


def plain(path, size) -> torch.Tensor:
    """Read an image file for validation, as (size, size, 3) bytes: its middle, 7/8 of the shorter side."""
    return read(path, size, middle_box)


def read(path, size, box_of) -> torch.Tensor:
    """Read the part ``box_of(image)`` = (left, top, width, height) of a file; grey and CMYK images become RGB."""
    try:
        with Image.open(io.BytesIO(Path(path).read_bytes())) as image:
            left, top, width, height = box_of(image)
            whole = image.width
            # JPEG alone can decode at a reduced size that still has `size` pixels per side of the box
            image.draft("RGB", [math.ceil(side * size / min(width, height)) for side in image.size])
            share = image.width / whole
            box = [round(edge * share) for edge in (left, top, left + width, top + height)]
            part = np.array(image.crop(box).convert("RGB"))
    except UNREADABLE as error:
        why = f"image file {path} cannot be read: {_why(error)}; replace it or remove it"
        raise UserError(why) from None
    # (1, 3, H, W), the three channels of a pixel side by side
    pixels = torch.from_numpy(part).permute(2, 0, 1)[None]
    return interpolate(pixels, (size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def _why(error) -> str:
    """Put PIL's error in a few words: its own name its source files."""
    if isinstance(error, UnidentifiedImageError):
        return "it is empty or of no known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "larger than PIL allows" if isinstance(error, Image.DecompressionBombError) else "damaged or cut off"


def random_box(image):
    """Draw the part that torchvision's ``RandomResizedCrop`` would take."""
    from torchvision.transforms import RandomResizedCrop  # loaded late: it takes a second

    top, left, height, width = RandomResizedCrop.get_params(image, AREA, RATIO)
    return left, top, width, height


def middle_box(image):
    """Return the square in the middle, 7/8 of the shorter side."""
    side = max(1, round(min(image.size) * 0.875))
    return (image.width - side) // 2, (image.height - side) // 2, side, side


def normalise(images, pixels) -> torch.Tensor:
    """Turn bytes (B, S, S, C) into floats around 0, (B, C, S, S), on the device on which they are.

    `pixels` are mean and standard deviation of each channel, of values from 0 to 1.
    """
    mean, std = (255 * torch.tensor(values, device=images.device).view(-1, 1, 1) for values in pixels)
    images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return images.sub_(mean).div_(std)

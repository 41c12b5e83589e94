"""Image files, read as fast as one core can: decode, crop and resize in whole numbers (uint8), normalise the batch.

Three things make it faster than PIL's images and torchvision's float transforms: a JPEG file is decoded straight into a
tensor; a file far larger than the crop needs is decoded at 1/2, 1/4 or 1/8 of its size; and pixels stay bytes up to
`normalise`, which handles a whole batch at once, on the device. Taught in notebooks/08_scaling.ipynb.
Sources: https://docs.pytorch.org/vision/stable/io.html, https://github.com/pytorch/vision/issues/8986.
"""

import functools
import io
import math

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.nn.functional import interpolate

from mpdemo.errors import UserError

UNREADABLE = (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError)  # of PIL and torchvision
LARGE = 2**18  # bytes of a file
AREA, RATIO, TRIES = 0.08, 4 / 3, 10  # of a random crop: least share of the image, widest shape; as torchvision's


def augmented(path, size):
    """Read an image file for training: a random part of it, mirrored in every second case.

    Parameters
    ----------
    path : str or Path
        JPEG, PNG or whatever else PIL opens; grey and CMYK images become RGB.
    size : int
        Pixels per side of the result.

    Returns
    -------
    torch.Tensor
        (size, size, 3), uint8: the three channels of a pixel beside each other, as the decoder leaves them.

    Raises
    ------
    UserError
        The file cannot be read as an image.
    """
    image = read(path, size, random_box)
    return image.flip(1) if torch.rand(()) < 0.5 else image


def plain(path, size):
    """Read an image file for validation: its middle, 7/8 of the shorter side. See `augmented`."""
    return read(path, size, middle_box)


def read(path, size, box_of):
    """Read the part ``box_of(width, height)`` = (left, top, width, height) of a file as (size, size, 3), uint8."""
    try:
        pixels, (left, top, width, height) = decode(np.fromfile(path, np.uint8), size, box_of)
    except UNREADABLE as error:
        why = what_is_wrong(error)
        raise UserError(f"image file {path} cannot be read: {why}; replace it or remove it") from None
    part = pixels[None, :, top : top + height, left : left + width]
    part = part.contiguous(memory_format=torch.channels_last)  # for it there is a fast path
    return interpolate(part, (size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def decode(content, size, box_of):
    """Decode an image file, its bytes given as an array; return pixels (3, H, W), uint8, and the box in them.

    A small file is decoded at once. Of a large one PIL reads the header first: where it may be decoded at a
    reduced size, and still have `size` pixels per side of the box, it is.
    """
    decode_jpeg = jpeg_decoder() if bytes(content[:2]) == b"\xff\xd8" else None
    if decode_jpeg and len(content) < LARGE:
        pixels = decode_jpeg(torch.from_numpy(content))
        return pixels, box_of(pixels.shape[2], pixels.shape[1])
    with Image.open(io.BytesIO(content.tobytes())) as image:
        full = image.size
        box = box_of(*full)
        factor = max(factor for factor in (1, 2, 4, 8) if factor == 1 or min(box[2:]) >= factor * size)
        if decode_jpeg and factor == 1:
            return decode_jpeg(torch.from_numpy(content)), box
        image.draft("RGB", [math.ceil(side / factor) for side in full])  # formats other than JPEG ignore it
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    share = pixels.shape[2] / full[0]  # 1, or below where it was decoded at a reduced size
    return pixels, [round(edge * share) for edge in box]


@functools.cache
def jpeg_decoder():
    """Return torchvision's decoder of JPEG files, or None: torchvision will hand it over to TorchCodec one day.

    PIL gives the very same pixels, more slowly.
    """
    try:
        from torchvision.io import ImageReadMode, decode_jpeg  # loaded late: it takes a second
    except ImportError:
        return None
    return functools.partial(decode_jpeg, mode=ImageReadMode.RGB)


def what_is_wrong(error) -> str:
    """Put PIL's or torchvision's error in a few words: theirs name their own source files and addresses."""
    if isinstance(error, UnidentifiedImageError):
        return "it is empty or of no known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "larger than PIL allows" if isinstance(error, Image.DecompressionBombError) else "damaged or cut off"


def random_box(width, height):
    """A random part of an image (left, top, width, height), drawn as torchvision's ``RandomResizedCrop`` does."""
    for _ in range(TRIES):
        share, shape, x, y = torch.rand(4, dtype=torch.double).tolist()
        area = width * height * (AREA + (1 - AREA) * share)
        ratio = RATIO ** (2 * shape - 1)  # as often wide as high
        w, h = max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))
        if w <= width and h <= height:
            return int(x * (width - w + 1)), int(y * (height - h + 1)), w, h
    w, h = min(width, round(height * RATIO)), min(height, round(width * RATIO))
    return (width - w) // 2, (height - h) // 2, w, h


def middle_box(width, height):
    """The square in the middle of an image, 7/8 of its shorter side: (left, top, width, height)."""
    side = max(1, round(min(width, height) * 0.875))
    return (width - side) // 2, (height - side) // 2, side, side


def normalise(images, pixels):
    """Make bytes numbers around 0, and bring each channel together, on the device on which they are.

    Parameters
    ----------
    images : torch.Tensor
        (B, S, S, C), uint8.
    pixels : tuple
        Mean and standard deviation of each channel, of pixels from 0 to 1.

    Returns
    -------
    torch.Tensor
        (B, C, S, S), float32.
    """
    mean, std = (255 * torch.tensor(values, device=images.device).view(-1, 1, 1) for values in pixels)
    images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return images.sub_(mean).div_(std)

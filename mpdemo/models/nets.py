"""The networks of the course, each a dictionary of named blocks that are applied one after the other.

The transformer is in transformer.py. Shapes: B batch, C channels, S image size (pixels).
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

from mpdemo.errors import UserError
from mpdemo.models.blocks import Blocks
from mpdemo.models.transformer import transformer
from mpdemo.settings import MODELS
from mpdemo.settings.cuts import DEPTH

Norm = Callable[[int], nn.Module]  # channels -> the layer that normalises them
NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(min(8, channels), channels),
}


def toy(inputs: int, classes: int) -> dict[str, nn.Module]:
    """Four small linear blocks on the flattened image: (B, C, S, S) -> (B, classes)."""
    return {
        "linear1": nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU()),
        "linear2": nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
        "linear3": nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
        "linear4": nn.Sequential(nn.Linear(32, classes)),
    }


def convnet(classes: int, channels: int, image_size: int, norm: Norm) -> dict[str, nn.Module]:
    """The MNIST ConvNet: two 5 x 5 convolutions (16 and 32 channels), each halving the image, one linear layer."""
    if image_size < 4:
        raise UserError(f"image size {image_size} is too small for convnet; allowed: 4 pixels or more")

    def layer(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 5, padding=2), norm(outputs), nn.ReLU(), nn.MaxPool2d(2)
        )

    return {
        "layer1": layer(channels, 16),  # (B, C, S, S) -> (B, 16, S/2, S/2)
        "layer2": layer(16, 32),  # -> (B, 32, S/4, S/4)
        # -> (B, classes)
        "fc": nn.Sequential(nn.Flatten(), nn.Linear(32 * (image_size // 4) ** 2, classes)),
    }


def convstack(classes: int, channels: int, norm: Norm) -> dict[str, nn.Module]:
    """Eight equal residual blocks of 64 channels at full resolution: every cut into equal halves is balanced."""
    from torchvision.models.resnet import BasicBlock

    blocks: dict[str, nn.Module] = {"embed": nn.Conv2d(channels, 64, 3, padding=1)}
    for number in range(DEPTH):
        blocks[f"block.{number}"] = BasicBlock(64, 64, norm_layer=norm)
    blocks["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    return blocks


def resnet(name: str, classes: int, channels: int, norm: Norm) -> dict[str, nn.Module]:
    """torchvision's ResNet as stem, residual blocks and head. Source: https://arxiv.org/abs/1512.03385."""
    from torchvision import models

    net = getattr(models, name)(num_classes=classes, norm_layer=norm)
    if channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    stem: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=net.conv1, bn1=net.bn1, relu=net.relu, maxpool=net.maxpool
    )
    blocks: dict[str, nn.Module] = {"stem": nn.Sequential(stem)}
    for layer in ("layer1", "layer2", "layer3", "layer4"):
        for number, block in getattr(net, layer).named_children():
            blocks[f"{layer}.{number}"] = block
    head: OrderedDict[str, nn.Module] = OrderedDict(avgpool=net.avgpool, flatten=nn.Flatten(), fc=net.fc)
    blocks["head"] = nn.Sequential(head)
    return blocks


def build(
    name: str,
    *,
    classes: int = 10,
    channels: int = 1,
    image_size: int = 28,
    norm: str = "batch",
    seed: int = 0,
) -> Blocks:
    """Build a model; the same arguments give the same initial weights in every process.

    Parameters
    ----------
    name : str
        One of `mpdemo.settings.MODELS`.
    classes, channels, image_size : int
        Of the data set: output classes, input channels, side of the square image in pixels.
    norm : {"batch", "group"}
        Normalisation of the convolutional models. Batch norm computes its statistics over the (micro)batch it sees,
        so cutting the batch changes the result; group norm normalises each image by itself, so it does not.
        Source: https://arxiv.org/abs/1803.08494.
    seed : int
        Of the initial weights.

    Returns
    -------
    Blocks
        On the CPU, in float32: images (B, channels, image_size, image_size) -> outputs (B, classes).

    Raises
    ------
    UserError
        A name that is not allowed, or an image size that the model cannot take.
    """
    for kind, choice, allowed in (("model", name, MODELS), ("norm", norm, NORMS)):
        if choice not in allowed:
            raise UserError(f"unknown {kind} {choice!r}; allowed: {', '.join(allowed)}")
    layer = NORMS[norm]
    networks: dict[str, Callable[[], dict[str, nn.Module]]] = {
        "toy": lambda: toy(channels * image_size**2, classes),
        "convnet": lambda: convnet(classes, channels, image_size, layer),
        "convstack": lambda: convstack(classes, channels, layer),
        "transformer": lambda: transformer(classes, channels, image_size),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Blocks(networks[name]() if name in networks else resnet(name, classes, channels, layer))
    model.input_shape = (channels, image_size, image_size)
    return model

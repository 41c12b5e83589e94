"""The vision transformer of the course: eight equal blocks, so that every cut into equal halves is balanced.

Shapes: B batch, C channels, S image size (pixels), T tokens, D width of a token, H heads.
Source: https://arxiv.org/abs/2010.11929. Taught in notebooks/12_one_step.ipynb.
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mpdemo.errors import UserError
from mpdemo.settings.cuts import DEPTH, HEADS, PATCH

WIDTH = 192


def transformer(classes: int, channels: int, image_size: int) -> dict[str, nn.Module]:
    """Return the blocks: (B, C, S, S) -> embed -> (B, T, D) -> eight blocks -> (B, T, D) -> head -> (B, classes)."""
    if image_size % PATCH:
        raise UserError(
            f"image size {image_size} does not divide into 7 x 7 patches; allowed: 28, 56, 224, ..."
        )
    blocks: dict[str, nn.Module] = {
        "embed": Embed(channels, WIDTH, PATCH, tokens=(image_size // PATCH) ** 2)
    }
    for number in range(DEPTH):
        blocks[f"block.{number}"] = Block(WIDTH, HEADS)
    blocks["head"] = Head(WIDTH, classes)
    return blocks


class Embed(nn.Module):
    """Cut the image into patches and add to each what is learned for its place: (B, C, S, S) -> (B, T, D)."""

    def __init__(self, channels: int, width: int, patch: int, tokens: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(0.5 * torch.randn(1, tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)  # (B, C, S, S) -> (B, D, S / patch, S / patch)
        x = x.flatten(2).transpose(1, 2)  # -> (B, D, T) -> (B, T, D)
        return x + self.position


class Attention(nn.Module):
    """Every token takes from all tokens of its image what fits its query: (B, T, D) -> (B, T, D).

    Query, key and value are layers of their own, so that tensor parallelism can give each device some of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        # softmax takes no notice of a number added to all its inputs
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(layer: nn.Module) -> torch.Tensor:
            # (B, T, D) -> (B, T, H, D / H) -> (B, H, T, D / H), of those that this device has
            return layer(x).unflatten(2, (-1, self.head_width)).transpose(1, 2)

        taken = scaled_dot_product_attention(heads(self.query), heads(self.key), heads(self.value))
        return self.out(taken.transpose(1, 2).flatten(2))  # -> (B, T, H, D / H) -> (B, T, D)


class Block(nn.Module):
    """Attention, then two linear layers for each token, each added to its input: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        layers: OrderedDict[str, nn.Module] = OrderedDict(up=up, act=nn.GELU(), down=down)
        self.mlp = nn.Sequential(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Average the tokens and classify: (B, T, D) -> (B, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x).mean(1))

"""Models as people write them: what `mpdemo plan --model` must be able to take (tests/test_plan_own_models.py)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision import models as zoo


class Layers(nn.Module):
    """A stem, equal layers in any container, the mean over the pixels, a head."""

    def __init__(self, layers, stem=None, head=10, twice=False):
        super().__init__()
        self.stem, self.layers, self.head = stem or nn.Identity(), layers, nn.Linear(16, head)
        self.twice = twice

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.twice else torch.relu(layer(x))
        return self.head(x.mean((2, 3)))


class NamedMean(nn.Module):
    """A buffer that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.second(self.first(x - self.mean)).mean((2, 3)))


class Tied(nn.Module):
    """One matrix at both ends."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(2000, 64), nn.TransformerEncoderLayer(64, 8, 64, batch_first=True)
        self.head = nn.Linear(64, 2000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


class Unused(nn.Module):
    """A layer that is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.used(x)


class TwoInputs(nn.Module):
    """Two inputs, and outputs by name."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 64), nn.Linear(64, 2)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, input_ids, attention_mask):
        hidden = self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"logits": self.head(hidden[:, 0]), "hidden": hidden}


def convs(count=6, width=16):
    return [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(count)]


def asks_while_built():
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 6)]
    return Layers(nn.ModuleList(convs(len(rates))))


def frozen_backbone():
    model = zoo.resnet18().requires_grad_(False)
    model.fc = nn.Linear(512, 10)
    return model


def checkpointed(twice=True):
    deep = (nn.Sequential(*(nn.Sequential(conv, nn.Tanh()) for conv in convs(5)[1:])) for _ in range(4))
    return Layers(nn.ModuleList(deep), stem=nn.Conv2d(3, 16, 3, padding=1), twice=twice)


def on_meta():
    with torch.device("meta"):
        return zoo.resnet18()


def two_inputs():
    tokens = torch.zeros(4, 64, dtype=torch.long)
    return TwoInputs(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class GrowingList(nn.Module):
    """A layer's input is a list that changes after the call, so that it cannot be computed again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Joined(8 * (number + 1)) for number in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1))


class Joined(nn.Module):
    """Concatenates all features of before, as DenseNet does."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, 8)

    def forward(self, features):
        return self.linear(self.norm(torch.cat(features, 1)))


class TwoOutputs(nn.Module):
    """Returns a second output from a layer in its middle, as GoogLeNet does."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head, self.aux = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        aux = self.aux(x)
        return self.head(self.second(x)), aux


class Branch(nn.Linear):
    """Asks for a value."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Masked(nn.Linear):
    """The shape of what it computes depends on values."""

    def forward(self, x):
        return super().forward(x[x[:, 0] > 0])


def needs_one(width):
    return nn.Linear(width, 8)


MODELS = {
    "orthogonal": lambda: nn.Sequential(
        nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10)
    ),
    "kept": lambda: checkpointed(False),
    "lazy": lambda: nn.Sequential(nn.LazyConv2d(16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)),
    "in_place_first": lambda: nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(7200, 10)
    ),
    "compiled": lambda: torch.compile(zoo.resnet18()),
    "scripted": lambda: torch.jit.script(zoo.resnet18()),
    "bf16": lambda: zoo.resnet18().bfloat16(),
    "double": lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(2))).double(),
    "dict_chain": lambda: Layers(nn.ModuleDict({f"part{i}": conv for i, conv in enumerate(convs())})),
    "words": lambda: nn.Sequential(nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 50)),
    "huge": lambda: nn.Sequential(nn.Flatten(), *(nn.Linear(2**16, 2**16) for _ in range(4))),
    "branch": lambda: Branch(8, 8),
    "masked": lambda: Masked(8, 8),
    "empty": lambda: nn.Sequential(nn.Flatten()),
    "number": lambda: 7,
}
globals().update(MODELS)  # a plan asks for a function by its name

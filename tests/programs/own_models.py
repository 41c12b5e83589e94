"""Models as people write them: what `mpdemo plan --model` must be able to take, and to refuse."""

import math
from collections import OrderedDict
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision import models as zoo

# By its path: where tests/bench/bench.py has been imported, `bench` is that module.
PUBLISHED = run_path(str(Path(__file__).parents[1] / "bench" / "published_models.py"))


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


class Tied(nn.Module):
    """One matrix at both ends."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = (
            nn.Embedding(2000, 64),
            nn.TransformerEncoderLayer(64, 8, 64, batch_first=True),
        )
        self.head = nn.Linear(64, 2000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


class WithTable(nn.Linear):
    """A block with a buffer, such as the tables of a rotary embedding."""

    def __init__(self):
        super().__init__(64, 64)
        self.register_buffer("table", torch.zeros(64, 64))


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


class Branch(nn.Linear):
    """Asks for a value."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Detector(nn.Module):
    """Levels of a pyramid, each with classes and boxes in an OrderedDict of its own class, as transformers' outputs."""

    class Output(OrderedDict):
        pass

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(conv(3 if n == 0 else 8, 8, 2) for n in range(3))
        self.classes, self.boxes = nn.Conv2d(8, 20, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        found = []
        for level in self.levels:
            x = level(x)
            found.append(self.Output(classes=self.classes(x), boxes=self.boxes(x).exp()))
        return found


class Experts(nn.Module):
    """A mixture of experts with a capacity: shapes do not depend on where the tokens go."""

    def __init__(self, experts=4, width=16, capacity=8):
        super().__init__()
        self.gate, self.capacity = nn.Linear(width, experts), capacity
        self.up, self.down = (nn.Parameter(torch.zeros(experts, width, width)) for _ in range(2))

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        weight, token = scores.T.topk(self.capacity)
        y = torch.einsum("ecd,edh->ech", flat[token], self.up).relu()
        y = torch.einsum("ech,ehd->ecd", y, self.down) * weight[..., None]
        mixed = torch.zeros_like(flat).index_add(0, token.flatten(), y.flatten(0, 1))
        return x + mixed.view_as(x), scores.square().mean()


class MixtureAsInPublicCode(nn.Module):
    """Each expert computes the tokens that chose it: how many, only numbers tell."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        chosen, y = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            where = torch.where(chosen == number)
            y[where] = expert(x[where])
        return y


class Moco(nn.Module):
    """A second encoder that follows the first, and a queue whose position is read from a buffer."""

    def __init__(self, size=64):
        super().__init__()
        self.encoder, self.follower = (nn.Sequential(nn.Flatten(), nn.Linear(48, 16)) for _ in range(2))
        self.follower.requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, size))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        query = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
                mine.mul_(0.99).add_(theirs, alpha=0.01)
            key = F.normalize(self.follower(x), dim=1)
        logits = torch.cat(((query * key).sum(1, keepdim=True), query @ self.queue.clone()), 1) / 0.07
        start = int(self.position)
        self.queue[:, start : start + len(key)] = key.T
        self.position[0] = (start + len(key)) % self.queue.shape[1]
        return logits, torch.zeros(len(x), dtype=torch.long, device=x.device)


class Contrast(nn.Module):
    """Two towers, all pairs of a batch, and a learnt scale: returns its loss."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Sequential(nn.Flatten(), nn.Linear(48, 16)), nn.EmbeddingBag(50, 16)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, image, text):
        pairs = F.normalize(self.image(image), dim=1) @ F.normalize(self.text(text), dim=1).T
        target = torch.arange(len(pairs), device=pairs.device)
        return F.cross_entropy(pairs * self.scale.exp(), target)


class Recommender(nn.Module):
    """Tables of different sizes and products of pairs of what they give, as DLRM; the pairs belong to no sample."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum") for rows in (1000, 50, 7))
        self.bottom, self.top = nn.Linear(13, 8), nn.Linear(14, 1)

    def forward(self, dense, sparse, pairs):
        x = torch.stack(
            [self.bottom(dense)] + [t(ids) for t, ids in zip(self.tables, sparse, strict=True)], 1
        )
        return self.top(torch.cat((x[:, 0], (x @ x.mT)[:, *pairs]), 1)).squeeze(1)


class Rivals(nn.Module):
    """A generator and a discriminator: a dict of losses."""

    def __init__(self):
        super().__init__()
        self.generator, self.judge = nn.Linear(8, 48), nn.Sequential(nn.Flatten(), nn.Linear(48, 1))

    def forward(self, x):
        made = self.generator(torch.randn(len(x), 8, device=x.device)).view_as(x)
        return {
            "generator": -self.judge(made).mean(),
            "judge": self.judge(made.detach()).mean() - self.judge(x).mean(),
        }


class Speech(nn.Module):
    """An LSTM with a loss that reads how long its samples are."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        logs, lengths = self.head(self.lstm(x)[0]).log_softmax(-1), torch.full((len(x),), 2)
        return nn.functional.ctc_loss(
            logs.transpose(0, 1), torch.ones(len(x), 2).long(), 3 * lengths, lengths
        )


class Recurrent(nn.Module):
    """An LSTM, its states returned as well."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(50, 8),
            nn.LSTM(8, 16, 2, batch_first=True),
            nn.Linear(16, 50),
        )

    def forward(self, tokens):
        x, states = self.lstm(self.embed(tokens))
        return self.head(x), states


class Gpt(nn.Module):
    """As nanoGPT: one layer for query, key and value, a loss where there are targets, and blocks by number."""

    class Block(nn.Module):
        def __init__(self, width=32, heads=4):
            super().__init__()
            self.n_head, self.ln_1, self.ln_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(
                OrderedDict(c_fc=nn.Linear(width, 64), gelu=nn.GELU(), c_proj=nn.Linear(64, width))
            )

        def forward(self, x):
            batch, length, width = x.shape
            parts = self.c_attn(self.ln_1(x)).split(width, 2)
            q, k, v = (
                t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in parts
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(self.ln_2(x))

    def __init__(self, layers=8):
        super().__init__()
        self.config = SimpleNamespace(n_layer=layers)
        blocks = nn.ModuleList(self.Block() for _ in range(layers))
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(50, 32), "h": blocks, "ln_f": nn.LayerNorm(32)}
        )
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens, targets=None):
        x = self.transformer.wte(tokens)
        for number in range(self.config.n_layer):
            x = self.transformer.h[number](x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Triplet(nn.Module):
    """One network on three images, as in metric learning."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 16))

    def forward(self, anchor, same, other):
        return SimpleNamespace(
            loss=F.triplet_margin_loss(self.net(anchor), self.net(same), self.net(other))
        )


class Fourier(nn.Module):
    """Complex weights in the space of frequencies."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 8, 8, 5, dtype=torch.cfloat))

    def forward(self, x):
        return torch.einsum("bihw,iohw->bohw", torch.fft.rfft2(x)[..., :8, :5], self.weight)


class Density(nn.Module):
    """Returns a distribution."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return torch.distributions.Normal(self.mean(x), F.softplus(self.spread(x)), validate_args=False)


class Adapters(nn.Module):
    """Frozen layers with small ones beside them, as PEFT makes them, checkpointed by its author."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(32, 32).requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

        def forward(self, x):
            return x + self.base(x) + self.lora_B(self.lora_A(x))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class OnAGpu(nn.Module):
    """Moves itself to a GPU, as many scripts do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64).cuda()
        self.register_buffer("mask", torch.ones(64, 64, device="cuda").tril())
        self.to("cuda")

    def forward(self, x):
        return self.layer(x) @ self.mask


class Nested(nn.Module):
    """Sequences of different lengths in one nested tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged))


class ReadsItsWeights(nn.Module):
    """Looks at a large tensor while it is built: only real numbers will do."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.largest = self.layer.weight.abs().max().item()

    def forward(self, x):
        return self.layer(x)


def conv(inside, outside, stride=1):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(4, outside), nn.SiLU())


def token_ids(*shape):
    return torch.zeros(4, *shape, dtype=torch.long)


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
        return Layers(nn.ModuleList(convs()))


def needs_one(width):
    return nn.Linear(width, 8)


MODELS = {
    "unet": lambda: PUBLISHED["UNet3d"]((8, 16, 32)),
    "orthogonal": lambda: nn.Sequential(
        nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10)
    ),
    "kept": lambda: checkpointed(False),
    "with_tables": lambda: nn.Sequential(*(WithTable() for _ in range(6))),
    "lazy": lambda: nn.Sequential(nn.LazyConv2d(16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)),
    "in_place_first": lambda: nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(7200, 10)
    ),
    "compiled": lambda: torch.compile(asks_while_built()),
    "scripted": lambda: torch.jit.script(nn.Linear(8, 8)),
    "bf16": lambda: asks_while_built().bfloat16(),
    "double": lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(2))).double(),
    "dict_chain": lambda: Layers(nn.ModuleDict({f"part{i}": conv for i, conv in enumerate(convs())})),
    "words": lambda: nn.Sequential(
        nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 50)
    ),
    "huge": lambda: nn.Sequential(nn.Flatten(), *(nn.Linear(2**16, 2**16) for _ in range(4))),
    "branch": lambda: Branch(8, 8),
    "empty": lambda: nn.Sequential(nn.Flatten()),
    "number": lambda: 7,
    "contrast": lambda: (Contrast(), (torch.zeros(4, 3, 4, 4), token_ids(6))),
    "recommender": lambda: (
        Recommender(),
        {
            "dense": torch.zeros(4, 13),
            "sparse": [token_ids(3), token_ids(5), token_ids(1)],
            "pairs": torch.tril_indices(4, 4, offset=-1),
        },
    ),
    "gpt_with_targets": lambda: (Gpt(), (token_ids(16), token_ids(16))),
    "triplet": lambda: (Triplet(), [torch.zeros(4, 3, 4, 4)] * 3),
    "read_small": lambda: ReadsItsWeights(64),
    "read_large": lambda: ReadsItsWeights(2**15),
}
globals().update(MODELS)  # a plan asks for a function by its name

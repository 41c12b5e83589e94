"""Models in public styles, each a few lines long: what `mpdemo plan --model` must be able to take, and to refuse."""

import math
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def conv(inside, outside, stride=1):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(4, outside), nn.SiLU())


class Detector(nn.Module):
    """Levels of a pyramid, each with classes and boxes: a list of dicts."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(conv(3 if n == 0 else 8, 8, 2) for n in range(3))
        self.classes, self.boxes = nn.Conv2d(8, 20, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        found = []
        for level in self.levels:
            x = level(x)
            found.append({"classes": self.classes(x), "boxes": self.boxes(x).exp()})
        return found


class Queries(nn.Module):
    """Objects asked for by learnt queries, with outputs of every layer, as DETR."""

    def __init__(self):
        super().__init__()
        self.features, self.queries = nn.Conv2d(3, 16, 8, 8), nn.Embedding(10, 16)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.classes = nn.Linear(16, 5)

    def forward(self, x):
        memory = self.features(x).flatten(2).transpose(1, 2)
        x, outputs = self.queries.weight.expand(len(memory), -1, -1), []
        for layer in self.layers:
            x = layer(x, memory)
            outputs.append(self.classes(x))
        return {"logits": outputs[-1], "aux_outputs": [{"logits": logits} for logits in outputs[:-1]]}


class Unet(nn.Module):
    """An encoder, a decoder, and skips between them: a dense map. With `steps`, noise is what it learns."""

    def __init__(self, steps=0):
        super().__init__()
        self.down = nn.ModuleList(conv(inside, outside) for inside, outside in ((3, 8), (8, 16), (16, 32)))
        self.up = nn.ModuleList(conv(inside, outside) for inside, outside in ((48, 16), (24, 8)))
        self.last, self.time, self.steps = nn.Conv2d(8, 3, 1), nn.Embedding(max(steps, 1), 32), steps

    def forward(self, x):
        if self.steps:
            noise, when = torch.randn_like(x), torch.randint(self.steps, (len(x),), device=x.device)
            x = x + noise
        skips = []
        for block in self.down:
            x = F.max_pool2d(block(x), 2)
            skips.append(x)
        x = x + self.time(when)[:, :, None, None] if self.steps else x
        for block, skip in zip(self.up, skips[1::-1], strict=True):
            x = block(torch.cat((F.interpolate(x, size=skip.shape[2:]), skip), 1))
        x = self.last(x)
        return F.mse_loss(F.interpolate(x, size=noise.shape[2:]), noise) if self.steps else x


class Segmentation(nn.Module):
    """Two heads, by name in an OrderedDict of its own class, as torchvision's and transformers' outputs."""

    class Output(OrderedDict):
        pass

    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.aux = conv(3, 8, 2), nn.Conv2d(8, 21, 1), nn.Conv2d(8, 21, 1)

    def forward(self, x):
        features = self.backbone(x)
        out = self.Output(out=F.interpolate(self.head(features), size=x.shape[2:], mode="bilinear"))
        out["aux"] = self.aux(features)
        return out


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


class ExpertsInTurn(nn.Module):
    """Blocks that alternate, so that they are no list of equal ones, and a second loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(Experts() if n % 2 else nn.Linear(16, 16) for n in range(8))

    def forward(self, tokens):
        x, balance = self.embed(tokens), 0
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x, more = x
                balance = balance + more
        return self.head(x), balance


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
    """Tables of different sizes and pairwise products of what they give, as DLRM."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum") for rows in (1000, 50, 7))
        self.bottom, self.top = nn.Linear(13, 8), nn.Linear(14, 1)

    def forward(self, dense, sparse):
        x = torch.stack([self.bottom(dense)] + [t(ids) for t, ids in zip(self.tables, sparse, strict=True)], 1)
        first, second = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat((x[:, 0], (x @ x.mT)[:, first, second]), 1)).squeeze(1)


class Autoencoder(nn.Module):
    """Three outputs in a named tuple."""

    Output = namedtuple("Output", "image mean variance")

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(48, 16), nn.Linear(8, 48)

    def forward(self, x):
        mean, variance = self.inside(x.flatten(1)).chunk(2, 1)
        hidden = mean + torch.randn_like(mean) * (variance / 2).exp()
        return self.Output(self.outside(hidden).view_as(x), mean, variance)


class Rivals(nn.Module):
    """A generator and a discriminator: a dict of losses."""

    def __init__(self):
        super().__init__()
        self.generator, self.judge = nn.Linear(8, 48), nn.Sequential(nn.Flatten(), nn.Linear(48, 1))

    def forward(self, x):
        made = self.generator(torch.randn(len(x), 8, device=x.device)).view_as(x)
        return {"generator": -self.judge(made).mean(), "judge": self.judge(made.detach()).mean() - self.judge(x).mean()}


class Recurrent(nn.Module):
    """An LSTM, its states returned as well."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(50, 8), nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 50)

    def forward(self, tokens):
        x, states = self.lstm(self.embed(tokens))
        return self.head(x), states


class Speech(nn.Module):
    """Convolutions over time and a loss of its own, CTC."""

    def __init__(self):
        super().__init__()
        self.conv, self.gru = nn.Conv1d(8, 16, 3, 2, 1), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, x):
        return self.head(self.gru(self.conv(x).transpose(1, 2))[0]).log_softmax(-1)


class Graph(nn.Module):
    """Messages along the edges of a graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, nodes, edges):
        start, end = edges.T
        for layer in self.layers:
            nodes = nodes + torch.zeros_like(nodes).index_add(0, end, layer(nodes)[start]).relu()
        return nodes.mean(0)


class Vit(nn.Module):
    """A class token and equal blocks in PyTorch's own encoder; rates that are read while it is built."""

    def __init__(self, depth=7):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.zeros(1, 1, 16))
        self.place = nn.Parameter(torch.zeros(1, 65, 16))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, depth), nn.Linear(16, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.place
        return self.head(self.encoder(x)[:, 0])


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
            q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(self.ln_2(x))

    def __init__(self, layers=8):
        super().__init__()
        self.config = SimpleNamespace(n_layer=layers)
        blocks = nn.ModuleList(self.Block() for _ in range(layers))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(50, 32), "h": blocks, "ln_f": nn.LayerNorm(32)})
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
        return SimpleNamespace(loss=F.triplet_margin_loss(self.net(anchor), self.net(same), self.net(other)))


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


class Scan(nn.Module):
    """A state that goes from token to token, as in state space models."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside, self.decay = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        state, outputs = 0, []
        for step in self.inside(x).unbind(1):
            state = state * self.decay.sigmoid() + step
            outputs.append(state)
        return self.outside(torch.stack(outputs, 1))


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


def words(*shape):
    return torch.zeros(4, *shape, dtype=torch.long)


MODELS = {
    "mixture_in_a_row": lambda: Experts(),
    "diffusion": lambda: Unet(steps=100),
    "contrast": lambda: (Contrast(), (torch.zeros(4, 3, 4, 4), words(6))),
    "recommender": lambda: (Recommender(), {"dense": torch.zeros(4, 13), "sparse": [words(3), words(5), words(1)]}),
    "graph": lambda: (Graph(), (torch.zeros(10, 8), torch.zeros(30, 2, dtype=torch.long))),
    "gpt_with_targets": lambda: (Gpt(), (words(16), words(16))),
    "triplet": lambda: (Triplet(), [torch.zeros(4, 3, 4, 4)] * 3),
    "read_small": lambda: ReadsItsWeights(64),
    "read_large": lambda: ReadsItsWeights(2**15),
}
globals().update(MODELS)  # a plan asks for a function by its name

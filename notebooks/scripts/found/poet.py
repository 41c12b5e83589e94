# poet.py -- my little GPT, in the style of nanoGPT
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT = 64


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool(), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        seen = scores.masked_fill(~self.mask, -torch.inf).softmax(-1) @ v
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Poet(nn.Module):
    def __init__(self, d=64, layers=4, heads=4):
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, d), nn.Embedding(CONTEXT, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(layers))
        self.ln, self.out = nn.LayerNorm(d), nn.Linear(d, 256, bias=False)
        self.out.weight = self.tok.weight  # tied
        for embedding in (self.tok, self.pos):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for layer in self.layers:
            x = layer(x)
        return self.out(self.ln(x))


def data():
    text = Path(__file__).with_name("text.txt").read_bytes()
    return torch.tensor(list(text[: len(text) // CONTEXT * CONTEXT - CONTEXT + 1]))

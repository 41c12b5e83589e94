"""A GPT in plain PyTorch to measure with: pre-norm blocks, causal attention, one matrix to embed and to predict tokens.

Its parts are modules so that each can be compiled alone: equal blocks are then compiled once, in seconds.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a skip connection."""

    def __init__(self, width, heads, checkpointing):
        super().__init__()
        self.heads, self.checkpointing = heads, checkpointing
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def compute(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, heads, positions, numbers per head
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointing else self.compute(x)


class End(nn.Module):
    """The last norm, a score for every token of the vocabulary, and the loss."""

    def __init__(self, width, embedding):
        super().__init__()
        self.norm, self.embedding = nn.LayerNorm(width), embedding

    def forward(self, x, targets):
        scores = linear(self.norm(x), self.embedding)
        return cross_entropy(scores.flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Takes tokens and the tokens that follow, both (batch, length), and returns the loss."""

    def __init__(self, layers, width, heads, length, vocabulary, checkpointing=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for embedding in (self.tokens, self.positions):
            # else the scores, which share the matrix, start too large
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, checkpointing) for _ in range(layers))
        self.end = End(width, self.tokens.weight)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.end(x, targets)

    def parts(self) -> list[nn.Module]:
        """What is compiled, one by one."""
        return [*self.blocks, self.end]

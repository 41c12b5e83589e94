"""A Llama-like model, written for these tests: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied or not."""

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).type_as(x)


class Attention(nn.Module):
    """Queries share keys and values in groups."""

    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(dim, hidden, bias=False),
        )
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and beside its input."""

    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim), RMSNorm(dim)
        self.self_attn, self.mlp = Attention(dim, heads, kv_heads), MLP(dim, hidden)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, layers, dim, heads, kv_heads, hidden, vocab, tied):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.head_dim = dim // heads

    def angles(self, tokens):
        position = torch.arange(tokens.shape[1], device=tokens.device)
        frequency = 1e4 ** (-torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim)
        angle = torch.outer(position, frequency)
        return [f(torch.cat((angle, angle), -1)).to(self.norm.weight.dtype) for f in (torch.cos, torch.sin)]

    def forward(self, tokens):
        cos, sin = self.angles(tokens)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


MODELS = {  # layers, width, heads, heads of keys and values, hidden width, vocabulary, tied
    "tied_20m": lambda: Llama(8, 384, 6, 2, 1024, 8192, True),
    "untied_20m": lambda: Llama(6, 384, 6, 2, 1024, 8192, False),
    "bf16_20m": lambda: Llama(8, 384, 6, 2, 1024, 8192, True).bfloat16(),
    "short_8b": lambda: Llama(7, 4096, 32, 8, 14336, 128256, False),
    "llama_8b": lambda: Llama(32, 4096, 32, 8, 14336, 128256, False),
    "llama_70b": lambda: Llama(80, 8192, 64, 8, 28672, 128256, False),
}
globals().update(MODELS)  # a plan asks for a function by its name

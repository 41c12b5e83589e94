"""A small GPT of equal blocks, and the speeches of a play to train it on."""

from pathlib import Path

import torch
import torch.distributed as dist
from job import refuse
from torch import nn
from torch.nn.functional import cross_entropy, gelu, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

LENGTH = 64  # tokens that the model sees; a token is a byte
END = 0  # the token before and after each speech
PADDING = -100  # a target that cross_entropy ignores


def make_datasets(edit=bytes, packed=False):
    """Return a training and a validation set; a sample is a speech, or LENGTH bytes of one, or many."""
    file = Path(__file__).with_name("text.txt")
    try:
        text = edit(file.read_bytes().strip())
    except OSError as error:
        refuse(f"{file} cannot be read ({error.strerror})")
    speeches = text.split(b"\n\n")[1:]  # the first paragraph only says where the text is from
    tokens = [[END, *speech, END] for speech in speeches]
    pieces = [row[k : k + LENGTH + 1] for row in tokens for k in range(0, len(row) - 1, LENGTH)]
    if len(pieces) <= 256:
        refuse(f"{file}: only {len(pieces)} samples; is it UTF-8, with empty lines, and no CRLF?")
    inputs, targets = (
        torch.zeros(len(pieces), LENGTH, dtype=torch.long),
        torch.full((len(pieces), LENGTH), PADDING),
    )
    for row, piece in enumerate(pieces):
        inputs[row, : len(piece) - 1] = torch.tensor(piece[:-1])
        targets[row, : len(piece) - 1] = torch.tensor(piece[1:])  # of each token, the next one
    sets = (inputs[:-256], targets[:-256]), (inputs[-256:], targets[-256:])
    return [TensorDataset(*(pack(*tensors) if packed else tensors)) for tensors in sets]


def pack(inputs, targets):
    """Return rows full of speeches, one after the other: only the last row has padding."""
    scored = targets != PADDING
    rest = (0, -scored.sum().item() % LENGTH)
    packed = pad(inputs[scored], rest), pad(targets[scored], rest, value=PADDING)
    return [tokens.view(-1, LENGTH) for tokens in packed]


class Block(nn.Module):
    """Attention, then two linear layers; takes and returns (batch, length, width)."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.attend = scaled_dot_product_attention  # context parallelism replaces it
        # Rotary position embedding: a table, not a weight, so it is in no state dict.
        self.register_buffer("angles", torch.empty(LENGTH, self.head_size // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Fill what is this module's own, as PyTorch's layers do: it may have been given new memory."""
        turns = 10000.0 ** -torch.linspace(0, 1, self.head_size // 2)
        self.angles.copy_(torch.outer(torch.arange(LENGTH), turns))

    def rotate(self, x):
        """Turn each pair of a head's values by an angle that grows with the position."""
        a, b = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).type_as(x)

    def forward(self, x, **documents):  # for an own `attend`
        # The rows of qkv are ordered by head, so tensor parallelism gives each rank whole heads.
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size)).transpose(1, 2)
        q, k, v = heads.unbind(3)  # each (batch, heads, length, head size)
        seen = self.attend(self.rotate(q), self.rotate(k), v, is_causal=True, **documents)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def mlp(self, x):
        return self.down(gelu(self.up(x)))


class GPT(nn.Module):
    """Predicts the next token: (batch, length) tokens in, (batch, length, 256) logits out.

    With targets it returns their loss instead, summed over all tokens but padding.
    """

    def __init__(self, width=64, blocks=4, heads=4, checkpointing=False):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.checkpointing = checkpointing  # recompute each block in the backward pass

    def forward(self, tokens, targets=None, **documents):
        x = self.embed(tokens)
        for block in self.blocks.children():
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=False, **documents)
            else:
                x = block(x, **documents)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def flops_per_token(self):
        """Return the operations of a step per token, as PaLM's appendix B counts them.

        Each weight takes 2 in the forward pass, 2 for its input's gradient and 2 for its own.
        """
        weights = sum(p.numel() * (6 if p.requires_grad else 4) for p in self.parameters())
        return weights + 12 * len(self.blocks) * self.embed.embedding_dim * LENGTH


def count(targets):
    """Return how many tokens are scored."""
    return (targets != PADDING).sum().item()


@torch.no_grad()
def mean_loss(model, loader, device):
    """Return the mean over all ranks' tokens. All need as many batches: FSDP gathers in each."""
    model.eval()
    sums = torch.zeros(2, device=device)  # of losses and of tokens
    for inputs, targets in loader:
        loss = model(inputs.to(device), targets.to(device))
        sums += torch.tensor([loss, count(targets)], device=device)
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def sample(model, device, length=200):
    """Return text that the model writes: the same on all ranks, and all have to call it."""
    chance, tokens = torch.Generator().manual_seed(0), [END]
    for _ in range(length):
        speech = tokens[-1 - tokens[::-1].index(END) :][-LENGTH:]  # the one that is being written
        context = torch.zeros(1, LENGTH, dtype=torch.long, device=device)
        context[0, : len(speech)] = torch.tensor(speech)  # what follows it is not seen
        chances = model(context)[0, len(speech) - 1].float().cpu().div(0.7).softmax(-1)
        tokens.append(torch.multinomial(chances, 1, generator=chance).item())
    return bytes(tokens).replace(bytes([END]), b"\n\n").decode(errors="replace").strip()

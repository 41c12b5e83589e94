"""Small own versions of the models whose training others have timed: the same sizes, written as their authors do."""

import torch
from gpu import gpt
from programs.llama import Llama
from torch import nn
from torch.nn import functional as f
from torchvision.models.resnet import Bottleneck, ResNet

from mpdemo.tools.plan import variants


class Block(nn.Module):
    """Attention and MLP as in GPT-2; `explicit` attention keeps the scores, as before PyTorch 2.0."""

    def __init__(self, width, heads, how):
        super().__init__()
        self.heads, self.how, bias = heads, how, "bias" in how
        norm = nn.RMSNorm if "rms" in how else lambda size: nn.LayerNorm(size, bias=bias)
        self.norm_1, self.norm_2, self.act = (
            norm(width),
            norm(width),
            nn.ReLU() if "rms" in how else nn.GELU(),
        )
        self.qkv, self.out_proj = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)
        self.drop = nn.Dropout(0.1 if "dropout" in how else 0.0)

    def forward(self, x):
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, 2)
        )
        if "explicit" in self.how:
            scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
            if "both" not in self.how:
                later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(later, float("-inf"))
            attended = self.drop(scores.softmax(3)) @ v
        else:
            attended = f.scaled_dot_product_attention(q, k, v, is_causal="both" not in self.how)
        x = x + self.drop(self.out_proj(attended.transpose(1, 2).flatten(2)))
        y = self.act(self.up_proj(self.norm_2(x)))
        return x + self.drop(self.down_proj(y.square() if "rms" in self.how else y))


class GPT(nn.Module):
    """GPT-2 and its kin: MosaicML's MPT, nanoGPT, nanochat; BERT with attention to both sides."""

    def __init__(self, width, layers, heads, length, vocabulary=50368, how=""):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.how = nn.ModuleList(Block(width, heads, how) for _ in range(layers)), how
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        if "untied" not in how:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x, targets = self.norm(x), tokens  # in the place of labels
        if "both" in self.how:  # BERT predicts 15 % of the tokens
            x, targets = (t[:, : tokens.shape[1] * 15 // 100] for t in (x, tokens))
        return f.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class DiTBlock(nn.Module):
    """Attention and MLP on patches, shifted and scaled by what the image is to show."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.shifts = heads, nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x, shown):
        shift, scale, gate, shift_2, scale_2, gate_2 = self.shifts(shown).unsqueeze(1).chunk(6, 2)
        y = self.qkv(self.norm_1(x) * (1 + scale) + shift)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in y.chunk(3, 2))
        x = x + gate * self.proj(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class DiT(nn.Module):
    """DiT-XL/2 of fast-DiT, on latents of 256 pixels; its average of the weights (EMA) is a buffer here."""

    def __init__(self, width=1152, layers=28, heads=16):
        super().__init__()
        self.patches, self.end = nn.Conv2d(4, width, 2, stride=2), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.shown = nn.Parameter(torch.zeros(1, width))
        self.register_buffer("average", torch.empty(sum(p.numel() for p in self.parameters())))

    def forward(self, latents):
        x = self.patches(latents).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, self.shown.expand(len(x), -1))
        return self.end(x).float().square().mean()


class UNet3d(nn.Module):
    """nnU-Net's 3D network as NVIDIA has it: two convolutions at each of six sizes, down and up."""

    def __init__(self, widths=(32, 64, 128, 256, 320, 320)):
        super().__init__()
        pairs = list(zip((4, *widths), widths, strict=False))
        self.down = nn.ModuleList(self.two(a, b, 1 + (n > 0)) for n, (a, b) in enumerate(pairs))
        ups = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in ups)
        self.after = nn.ModuleList(self.two(2 * b, b, 1) for _, b in ups)
        self.end = nn.ModuleList(nn.Conv3d(width, 4, 1) for width in widths[:2])  # with deep supervision

    @staticmethod
    def two(a, b, stride):
        parts = ((a, stride), (b, 1))
        return nn.Sequential(*(
            part for n, s in parts
            for part in (nn.Conv3d(n, b, 3, s, 1, bias=False), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01))
        ))  # fmt: skip

    def forward(self, x):
        kept = []
        for part in self.down:
            kept.append(x := part(x))
        kept.pop()
        for up, part in zip(self.up, self.after, strict=True):
            x = part(torch.cat([up(x), kept.pop()], 1))
        return self.end[0](x)


class ViT(nn.Module):
    """A ViT of DINO, whose attention is written out."""

    def __init__(self, width=384, layers=12, heads=6):
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, width, 16, 16), nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.ModuleList(Block(width, heads, "bias explicit both") for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([x[:, :1], x], 1)
        x = x + self.place[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class DINO(nn.Module):
    """A student that sees two large and eight small crops, a teacher that sees the large ones."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = self.with_head(), self.with_head().requires_grad_(False)

    @staticmethod
    def with_head(width=384, out=65536):
        sizes = ((width, 2048), (2048, 2048), (2048, 256), (256, out))
        return nn.ModuleList(
            [ViT(width), nn.Sequential(*(p for a, b in sizes for p in (nn.Linear(a, b), nn.GELU())))]
        )

    def forward(self, large, small):
        large, small = (x.transpose(0, 1).flatten(0, 1) for x in (large, small))
        with torch.no_grad():
            (vit, head), (twin, end) = self.student, self.teacher
            wanted = f.softmax(end(twin(large)).float() / 0.04, -1).chunk(2)
        seen = (head(torch.cat([vit(large), vit(small)])) / 0.1).float().chunk(10)
        pairs = [(a, b) for n, a in enumerate(wanted) for m, b in enumerate(seen) if n != m]
        return sum(torch.sum(-a * f.log_softmax(b, -1), -1).mean() for a, b in pairs) / len(pairs)


MPT = {  # width, layers, heads
    "125M": (768, 12, 12), "1B": (2048, 24, 16), "3B": (2560, 32, 20), "7B": (4096, 32, 32), "13B": (5120, 40, 40),
    "30B": (7168, 48, 56), "70B": (8192, 80, 64),
}  # fmt: skip
LLAMA = {  # layers, width, heads, heads of keys, hidden, vocabulary
    "Llama 2 7B": (32, 4096, 32, 32, 11008, 32000), "Llama 2 13B": (40, 5120, 40, 40, 13824, 32000),
    "Llama 2 34B": (48, 8192, 64, 8, 22016, 32000), "Llama 2 70B": (80, 8192, 64, 8, 28672, 32000),
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 128256), "Llama 3 70B": (80, 8192, 64, 8, 28672, 128256),
    "TinyLlama 1.1B": (22, 2048, 32, 4, 5632, 32000), "OLMo 2 1B": (16, 2048, 16, 16, 8192, 100352),
    "SmolLM 1B": (16, 2048, 32, 8, 8192, 128256), "Llama 13B": (40, 5120, 40, 8, 17920, 128256),
    "Qwen2.5 7B": (28, 3584, 28, 4, 18944, 152064),
}  # fmt: skip
GPTS = {  # width, layers, heads, vocabulary, how
    "GPT-2 124M": (768, 12, 12, 50304, "explicit"), "GPT-2 124M, flash": (768, 12, 12, 50304, ""),
    "nanochat d20": (1280, 20, 10, 65536, "rms untied"),
    "BERT large": (1024, 24, 16, 30528, "bias both explicit dropout"),
    "phi-1.5": (2048, 24, 32, 51200, "bias untied"),
}  # fmt: skip


def fused(model):
    """Give a Llama PyTorch's RMS norm, as in torchtitan, in the place of one in several kernels."""
    for part in list(model.modules()):
        for name, child in part.named_children():
            if type(child).__name__ == "RMSNorm" and type(child) is not nn.RMSNorm:
                setattr(part, name, nn.RMSNorm(child.weight.numel(), eps=1e-5))
    return model


def build(name, length, half=False, adapters=0, norms=True):
    """Return the model of a run, and its inputs where a shape does not tell them."""
    if name.startswith("Res"):
        deep, wide = ("NeXt" in name), {"groups": 32, "width_per_group": 4}
        layers = [3, 4, 23 if deep else 6, 3]
        return ResNet(Bottleneck, layers, **(wide if deep else {})).to(memory_format=torch.channels_last)
    if name in LLAMA:
        model = Llama(*LLAMA[name], "Smol" in name)
        model = fused(model) if norms else model
    elif name in GPTS:
        width, layers, heads, vocabulary, how = GPTS[name]
        model = GPT(width, layers, heads, length, vocabulary, how)
    elif name.startswith("MPT"):
        model = GPT(*MPT[name.removeprefix("MPT ")], length)
    elif name == "GPT 1B":
        tokens = torch.zeros(2, length, dtype=torch.long)
        return gpt.GPT(18, 2048, 16, length, 50304), (tokens, tokens)
    elif name == "DINO ViT-S":
        return DINO(), (torch.zeros(2, 2, 3, 224, 224), torch.zeros(2, 8, 3, 96, 96))
    else:
        return {"DiT-XL/2": DiT, "nnU-Net 3D": UNet3d}[name]()
    model = model.bfloat16() if half and not adapters else model
    if adapters:  # LoRA on queries and values, as litgpt has it
        variants.adapt(model, [block for block in model.blocks], adapters)
    return model

"""Plan training runs whose speed others have published, and print both as the table of tests/bench/published.md.

    python tests/bench/published.py [part of a model's name]
    python tests/bench/published.py --choose     fit what mpdemo/tools/plan/efficiency.py has of A100 and several H100

A step's time is its tokens or images divided by the published rate. Models are small own versions of the published
ones. All runs take about a quarter of an hour.
"""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests

import numpy as np
import torch
from gpu import gpt
from programs.llama import Llama
from torch import nn
from torch.nn import functional as f
from torchvision.models.resnet import Bottleneck, ResNet

from mpdemo.paths import root
from mpdemo.tools.plan import own
from mpdemo.tools.plan.efficiency import AT_BEST, ATTENTION, COMPILED, CONVOLUTION_32, MEASURED, PRODUCT
from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.request import PlanRequest


class Block(nn.Module):
    """Attention and MLP as in GPT-2, without biases; `explicit` attention keeps the scores, as before PyTorch 2.0."""

    def __init__(self, width, heads, explicit):
        super().__init__()
        self.explicit, self.heads = explicit, heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out_proj = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up_proj, self.down_proj = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x):
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, 2)
        )
        if self.explicit:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            attended = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(
                later, float("-inf")
            ).softmax(3) @ v
        else:
            attended = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(attended.transpose(1, 2).flatten(2))
        return x + self.down_proj(f.gelu(self.up_proj(self.norm_2(x))))


class GPT(nn.Module):
    """MosaicML's MPT, and nanoGPT: learned positions, and an output layer that is the embedding."""

    def __init__(self, width, layers, heads, length, explicit):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50368, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, explicit) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, 50368, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        # in the place of labels
        return f.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


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


MPT = {  # width, layers, heads
    "125M": (768, 12, 12), "1B": (2048, 24, 16), "3B": (2560, 32, 20), "7B": (4096, 32, 32), "13B": (5120, 40, 40),
    "30B": (7168, 48, 56), "70B": (8192, 80, 64),
}  # fmt: skip
LLAMA = {  # layers, width, heads, heads of keys, hidden, vocabulary
    "2 7B": (32, 4096, 32, 32, 11008, 32000), "2 13B": (40, 5120, 40, 40, 13824, 32000),
    "2 34B": (48, 8192, 64, 8, 22016, 32000), "2 70B": (80, 8192, 64, 8, 28672, 32000),
    "3 8B": (32, 4096, 32, 8, 14336, 128256), "3 70B": (80, 8192, 64, 8, 28672, 128256),
}  # fmt: skip
SOURCES = {
    "MosaicML": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "IBM": "https://github.com/foundation-model-stack/fms-fsdp",
    "torchtitan A100": "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md",
    "torchtitan H100": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "nanoGPT": "https://github.com/karpathy/nanoGPT",
    "fast-DiT": "https://github.com/chuanyangjin/fast-DiT",
    "NVIDIA": "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets",
    "ours": "notebooks/gpu/2026-11-27-4-h100.json",
}


class Run(NamedTuple):
    """A published run: `batch` samples of a device in each of `parts` microbatches, and its `rate` per device."""

    source: str
    model: str
    gpu: str
    devices: int
    length: int  # tokens of a sample, or pixels of a side
    batch: int
    rate: float  # tokens or images per second and device
    parts: int = 1
    recomputed: bool = False
    hsdp: bool = False
    bf16: bool = True
    compiled: bool = False
    used: bool = False  # to choose an efficiency, so that it is no test

    @property
    def seconds(self):
        """Published seconds of a step."""
        return self.batch * self.parts * (1 if self.of_images else self.length) / self.rate

    @property
    def row(self):
        """What `mpdemo plan` calls it, recomputed or not."""
        return ("single" if self.devices == 1 else "hsdp" if self.hsdp else "fsdp") + ", bf16" * self.bf16

    @property
    def of_images(self):
        """Whether it trains a ResNet."""
        return self.model.startswith("Res")


RUNS = [
    Run("MosaicML", "MPT 125M", "a100-80", 8, 2048, 40, 142830, parts=2, used=True),
    Run("MosaicML", "MPT 1B", "a100-80", 8, 2048, 14, 20513, parts=4, used=True),
    Run("MosaicML", "MPT 1B", "a100-80", 8, 32768, 1, 6275, parts=4, used=True),
    Run("MosaicML", "MPT 3B", "a100-80", 8, 8192, 3, 7695, parts=6, used=True),
    Run("MosaicML", "MPT 7B", "a100-80", 8, 2048, 6, 4641, parts=2, used=True),
    Run("MosaicML", "MPT 7B", "a100-80", 8, 4096, 16, 3684, parts=2, recomputed=True, used=True),
    Run("MosaicML", "MPT 13B", "a100-80", 8, 2048, 2, 2262, parts=3, used=True),
    Run("MosaicML", "MPT 70B", "a100-80", 64, 2048, 8, 410, parts=4, recomputed=True),
    Run("MosaicML", "MPT 7B", "a100", 64, 2048, 18, 3665, recomputed=True),
    Run("torchtitan A100", "Llama 2 13B", "a100-80", 64, 4096, 2, 2162),
    Run("torchtitan A100", "Llama 2 70B", "a100-80", 64, 4096, 2, 353, recomputed=True),
    Run("torchtitan A100", "Llama 3 70B", "a100-80", 64, 8192, 1, 331, recomputed=True),
    Run("IBM", "Llama 2 7B", "a100-80", 128, 4096, 2, 3760, hsdp=True),
    Run("IBM", "Llama 2 13B", "a100-80", 128, 4096, 1, 1700, hsdp=True),
    Run("IBM", "Llama 2 34B", "a100-80", 128, 4096, 8, 772, recomputed=True),
    Run("IBM", "Llama 2 70B", "a100-80", 128, 4096, 6, 380, recomputed=True),
    Run("nanoGPT", "GPT-2 124M", "a100", 1, 1024, 12, 12 * 1024 / 0.250),
    Run("nanoGPT", "GPT-2 124M", "a100", 1, 1024, 12, 12 * 1024 / 0.135, compiled=True),
    Run("fast-DiT", "DiT-XL/2", "a100-80", 1, 256, 128, 128 * 256 * 0.84, recomputed=True),
    Run("NVIDIA", "ResNet-50", "a100-80", 1, 224, 256, 2470),
    Run("NVIDIA", "ResNet-50", "a100-80", 1, 224, 256, 938, bf16=False, used=True),
    Run("NVIDIA", "ResNeXt-101", "a100", 1, 224, 128, 908.4),
    Run("NVIDIA", "ResNeXt-101", "a100", 1, 224, 128, 300.4, bf16=False),
    Run("MosaicML", "MPT 1B", "h100", 8, 2048, 14, 45455, used=True),
    Run("MosaicML", "MPT 1B", "h100", 8, 8192, 3, 29157, parts=4, used=True),
    Run("MosaicML", "MPT 3B", "h100", 16, 2048, 10, 24142, parts=3, used=True),
    Run("MosaicML", "MPT 7B", "h100", 8, 2048, 6, 10643, used=True),
    Run("MosaicML", "MPT 7B", "h100", 8, 4096, 16, 8611, parts=2, recomputed=True, used=True),
    Run("MosaicML", "MPT 13B", "h100", 8, 2048, 2, 4792, used=True),
    Run("MosaicML", "MPT 13B", "h100", 64, 2048, 2, 4800),
    Run("MosaicML", "MPT 30B", "h100", 32, 2048, 14, 2308, parts=3, recomputed=True),
    Run("MosaicML", "MPT 70B", "h100", 64, 2048, 8, 1039, parts=4, recomputed=True),
    Run("IBM", "Llama 2 7B", "h100", 96, 4096, 2, 7500, hsdp=True),
    Run("IBM", "Llama 2 34B", "h100", 96, 4096, 2, 1550, recomputed=True),
    Run("IBM", "Llama 2 70B", "h100", 96, 4096, 2, 800, recomputed=True),
    # it recomputes a part: between these two
    Run("torchtitan H100", "Llama 3 8B", "h100", 8, 8192, 2, 5762),
    Run("torchtitan H100", "Llama 3 8B", "h100", 8, 8192, 2, 5762, recomputed=True),
    Run("ours", "GPT 1B", "h100", 1, 2048, 16, 16 * 2048 / 0.4807),
    Run("ours", "GPT 1B", "h100", 1, 2048, 16, 16 * 2048 / 0.5743, recomputed=True),
    Run("ours", "GPT 1B", "h100", 1, 2048, 16, 16 * 2048 / 0.4998, recomputed=True, compiled=True),
    Run("ours", "ResNet-50", "h100", 1, 224, 512, 512 / 0.1237),
    Run("ours", "ResNet-50", "h100", 1, 224, 512, 512 / 0.0863, compiled=True),
]


def compared() -> dict:
    """Count the published runs that chose no number, by row of the plan: HSDP is FSDP within a node, and they share."""
    others = [run for run in RUNS if not run.used and run.source != "ours"]
    runs = {run._replace(recomputed=False) for run in others}  # torchtitan's one run stands in two rows
    found = Counter(run.row for run in runs)
    return found | dict.fromkeys(("fsdp, bf16", "hsdp, bf16"), found["fsdp, bf16"] + found["hsdp, bf16"])


def peaks() -> dict:
    """Return measured over planned peaks of a GPU that holds the whole model, by row of the plan, from our records."""
    folder, found = root() / "notebooks/gpu", {"single": [], "single, bf16": []}
    for name, part in (("2026-11-27-4-h100.json", "predicted"), ("2026-11-27-5-h100.json", "memory")):
        parts = json.loads((folder / name).read_text())["parts"]
        for row in next(each["rows"] for each in parts if each["part"] == part):
            case = row.get("case", {"precision": "bf16"})
            if case.get("rung", "single") == "single":
                ratio = (
                    row["counted"] / row["predicted"]
                    if "case" in row
                    else row["measured_gib"] / row["predicted_gib"]
                )
                found["single, bf16" if case.get("precision") == "bf16" else "single"].append(ratio)
    return found


def fused(model):
    """Give a Llama PyTorch's RMS norm, as in torchtitan, in the place of one in several kernels."""
    for part in list(model.modules()):
        for name, child in part.named_children():
            if type(child).__name__ == "RMSNorm":
                setattr(part, name, nn.RMSNorm(child.weight.numel(), eps=1e-5))
    return model


def build(run):
    """Return the model of a run."""
    family, _, size = run.model.partition(" ")
    if run.of_images:
        wide = {"groups": 32, "width_per_group": 4} if family == "ResNeXt-101" else {}
        return ResNet(Bottleneck, [3, 4, 23 if wide else 6, 3], **wide).to(
            memory_format=torch.channels_last
        )
    if family == "Llama":
        model = Llama(*LLAMA[size], False)
        return fused(model) if "titan" in run.source else model
    if family == "DiT-XL/2":
        return DiT()
    if run.source == "ours":
        tokens = torch.zeros(2, run.length, dtype=torch.long)
        return gpt.GPT(18, 2048, 16, run.length, 50304), (tokens, tokens)
    return GPT(*MPT["125M" if family == "GPT-2" else size], run.length, explicit=family == "GPT-2")


def planned(run, efficiency=None):
    """Return what the plan says of a run."""
    shape = (
        (4, 32, 32)
        if "DiT" in run.model
        else (3, run.length, run.length)
        if run.of_images
        else (run.length,)
    )
    model = OwnModel(run.model, shape, len(shape) == 1, partial(build, run))
    batch, nodes = run.devices * run.batch * run.parts, -(-run.devices // 8)
    efficiency = (efficiency or MEASURED[run.gpu])._replace(compiled=COMPILED if run.compiled else 1.0)
    optimizer = "momentum" if run.of_images and run.source != "ours" else "adamw"
    request = PlanRequest(
        model, batch, run.devices, nodes, GPUS[run.gpu].memory, optimizer, run.gpu, efficiency=efficiency
    )
    way = {"bf16": run.bf16, "checkpointing": run.recomputed, "parts": (run.parts,)}
    find = partial(own.sharded, hsdp=run.hsdp, **way) if run.devices > 1 else partial(own.replicated, **way)
    return own.with_spread(request, find)


def row(run) -> str:
    """Return a run as a line of the table."""
    found, part = planned(run), "pixels" if run.of_images else "tokens"
    how = [f"{run.batch * run.parts} x {run.length:,} {part}", "bf16" if run.bf16 else "TF32"]
    how += [word for word in ("recomputed", "hsdp", "compiled") if getattr(run, word)]
    ratio = found.seconds / run.seconds
    inside = "yes" if (1 - found.spread) * ratio <= 1 <= (1 + found.spread) * ratio else "no"
    cells = run.source, run.model, f"{run.devices} {run.gpu}", ", ".join(how), f"{run.seconds:.3f} s"
    cells += f"{found.seconds:.3f} s ± {found.spread:.0%}", f"{ratio:.2f}", inside
    cells += "yes" if run.used else "", f"{found.memory / 2**30:.1f}"
    return f"| {' | '.join(cells)} |"


def choose():
    """Print the fractions that bring the runs which are `used` as near to their plans as can be."""
    used = {gpu: [run for run in RUNS if run.used and run.gpu.startswith(gpu)] for gpu in ("a100", "h100")}

    def errors(reached):
        at = dict(zip((PRODUCT, ATTENTION, CONVOLUTION_32), np.exp(reached), strict=True))
        fractions = tuple(at.get(kind, old) for kind, old in enumerate(MEASURED["a100"].fractions))
        known = AT_BEST._replace(fractions=fractions)
        return np.array([np.log(planned(run, known).seconds / run.seconds) for run in used["a100"]])

    reached = np.log(np.full(3, 0.6))
    for _ in range(6):  # Gauss and Newton
        found = errors(reached)
        slopes = np.array([(errors(reached + step) - found) / 1e-3 for step in 1e-3 * np.eye(3)]).T
        reached -= np.linalg.lstsq(slopes, found, rcond=None)[0]
    alone = MEASURED["h100"]._replace(several=1.0)
    slower = [run.seconds / planned(run, alone).seconds for run in used["h100"]]
    print(
        f"A100: products, attention, convolutions in TF32 {np.exp(reached).round(2)}, then off by {found.round(2)}"
    )
    print(f"several H100: {1 / np.mean(slower):.2f}, since they took {np.round(slower, 2)} times as long")


def main():
    if sys.argv[1:] == ["--choose"]:
        sys.exit(choose())
    runs = [run for run in RUNS if " ".join(sys.argv[1:]) in run.model]
    heads = (
        "source",
        "model",
        "GPUs",
        "a device's step",
        "published",
        "planned",
        "ratio",
        "inside",
        "chosen by it",
        "GiB",
    )
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for run in runs:
        print(row(run), flush=True)


if __name__ == "__main__":
    main()

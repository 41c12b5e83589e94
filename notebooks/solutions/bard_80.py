# bard.py -- teaches a GPT to write like the Bard. one GPU, no frills
#   python bard.py --size small            the real thing: --size wanted
import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIZES = {  # width, layers, heads, context, batch, steps
    "small": (64, 4, 4, 64, 16, 20),
    "wanted": (4096, 32, 32, 2048, 64, 50_000),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class Bard(nn.Module):
    def __init__(self, d, layers, heads, context):
        super().__init__()
        self.tok, self.pos = nn.Embedding(128, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(layers))
        self.ln, self.out = nn.LayerNorm(d), nn.Linear(d, 128)

    def forward(self, ids, wanted):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.out(self.ln(x)).flatten(0, 1), wanted.flatten())


def get_batch(data, batch, context):
    starts = torch.randint(len(data) - context, (batch,)).tolist()
    rows = torch.stack([data[i : i + context + 1] for i in starts]).to(DEVICE)
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def fill(model, shapes):
    shards = dict(model.named_parameters())
    for name, layer in shapes.named_modules():
        if hasattr(layer, "reset_parameters"):
            layer.to_empty(device="cpu").reset_parameters()  # only this layer is whole
            for key, whole in layer.named_parameters(recurse=False):
                own = shards[f"{name}.{key}"]
                whole, mesh = whole.to(DEVICE), own.device_mesh
                own.copy_(distribute_tensor(whole, mesh, own.placements, src_data_rank=None))
            layer.to("meta")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    width, depth, heads, context, batch, steps = SIZES[args.size]

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)
    with torch.device("meta"):
        model, shapes = (Bard(width, depth, heads, context) for _ in range(2))
    policy = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    for module in [*model.layers, model]:
        fully_shard(module, mp_policy=policy)
    model.to_empty(device=DEVICE)
    fill(model, shapes)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda i: min(1, (i + 1) / 5) * (0.55 + 0.45 * math.cos(math.pi * i / steps))
    )
    text = Path(__file__).with_name("text.txt").read_text()
    data = torch.tensor([ord(c) for c in text])
    smooth = 0.0
    for step in range(steps):
        t0 = time.time()
        ids, wanted = (rows[rank::world] for rows in get_batch(data, batch, context))
        loss = model(ids, wanted)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        sched.step()
        loss = loss.detach() / world
        dist.all_reduce(loss)  # the mean over the ranks
        smooth = 0.9 * smooth + 0.1 * loss if step else loss
        if (step + 1) % 5 == 0 and rank == 0:
            ms = 1000 * (time.time() - t0)
            print(f"step {step + 1} | loss {smooth:.4f} | norm {norm:.2f} | {ms:.0f} ms", flush=True)


if __name__ == "__main__":
    main()

"""A real training step on the CPU, as a reader writes it, and what the allocator says of it (bench/planned.py)."""

import gc
from functools import partial
from pathlib import Path
from runpy import run_path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from mpdemo.predict.counting import CountMessages

MODELS = run_path(Path(__file__).with_name("llama.py"))["MODELS"]
COLUMNS, ROWS, WHOLE = tp.ColwiseParallel(), tp.RowwiseParallel(), Replicate()
IN_ATTENTION = {"input_layouts": (WHOLE, None, None), "desired_input_layouts": (WHOLE, None, None)}
IN_MLP = {"input_layouts": WHOLE, "desired_input_layouts": WHOLE}
KEPT = [torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
LAYERS = {
    "self_attn": tp.PrepareModuleInput(**IN_ATTENTION),
    "mlp": tp.PrepareModuleInput(**IN_MLP),
    **{f"self_attn.{name}_proj": COLUMNS for name in "qkv"},
    **{f"mlp.{name}_proj": COLUMNS for name in ("gate", "up")},
    "self_attn.o_proj": ROWS,
    "mlp.down_proj": ROWS,
}


def peak_of(prof) -> int:
    """Return by how many bytes the memory was larger than at the beginning."""
    events = [event for event in prof.kineto_results.events() if event.name() == "[memory]"]
    level, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def measured(name, batch, length, bf16=False, checkpointing=False, selective=False, how=None) -> dict:
    """Return the bytes at the peak of a step, and those of its collectives by kind."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for block in model.layers if checkpointing else []:
        contexts = partial(create_selective_checkpoint_contexts, KEPT) if selective else noop_context_fn
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    if how == "fsdp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        alone = (
            [] if model.lm_head.weight is model.embed_tokens.weight else [model.embed_tokens, model.lm_head]
        )
        for layer in [*model.layers, model.norm, *alone, model]:
            fully_shard(layer, mp_policy=policy)
    elif how == "tensor":
        for block in model.layers:
            tp.parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), LAYERS)
            block.self_attn.num_heads //= dist.get_world_size()
            block.self_attn.num_kv_heads //= dist.get_world_size()
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) == split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], fused=True)
    tokens, labels = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))
    cast = torch.autocast("cpu", torch.bfloat16, enabled=bf16 and how is None)

    def step():
        with cast:
            outputs = model(tokens)
        loss = cross_entropy(outputs.float().flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with CountMessages() as sent:
        step()
    gc.collect()
    with profile(profile_memory=True) as prof:
        step()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    held = 3 * sum(p.nbytes for p in local) + tokens.nbytes + labels.nbytes
    return {"peak": held + peak_of(prof), "sent": sent.by_kind()}


class Stage(nn.Module):
    """Some of: the embedding, the blocks, and the norm with the head."""

    def __init__(self, model, start, stop):
        super().__init__()
        last = 1 + len(model.layers)
        self.embed = model.embed_tokens if start == 0 else None
        self.layers = model.layers[max(start - 1, 0) : stop - 1]
        self.head = nn.Sequential(model.norm, model.lm_head) if stop > last else None
        self.angles = model.angles

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        cos, sin = self.angles(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None else self.head(x)


def pipelined(name, batch, length, stages, microbatches, bf16=False) -> list:
    """Return the bytes at the peak of each process of a pipeline, by all that it has allocated since it has a model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        stage = Stage(MODELS[name](), *stages[rank])
    with profile(profile_memory=True) as prof:
        stage.to_empty(device="cpu")
        for weight in stage.parameters():
            nn.init.normal_(weight, std=0.02)
        for layer in [*stage.layers, stage] if bf16 else []:  # as train_gpt.py's --bf16
            alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "fsdp"))["fsdp"]
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            fully_shard(layer, mesh=alone, mp_policy=policy, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
        tokens, labels = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))
        given = ([tokens], {}) if rank == 0 else ([], {"target": labels, "losses": []})
        pipe = PipelineStage(stage, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(
            pipe, microbatches, lambda out, to: cross_entropy(out.flatten(0, 1).float(), to.flatten())
        )
        for _ in range(2):
            schedule.step(*given[0], return_outputs=False, **given[1])
            optimizer.step()
            optimizer.zero_grad()
    peaks = [None] * world
    dist.all_gather_object(peaks, peak_of(prof))
    return peaks

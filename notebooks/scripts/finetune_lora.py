"""Fine-tune the model of train_fsdp.py with LoRA, also sharded, until it writes in capitals.

One machine:     torchrun --standalone --nproc-per-node=2 finetune_lora.py  (after train_fsdp.py)
Several nodes:   sbatch train.sbatch, with this file's name in it
It saves and ends on SIGTERM and SIGUSR1, and the same command resumes, with any number of processes."""

import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from gpt import GPT, count, make_datasets, mean_loss, sample  # yours: a model of blocks, and its data
from job import GPU, agreed, copy_from_rank_0, join, make_loader, newest, report, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

EPOCHS, BATCH, WORKERS = 2, 32, 0  # batch: of all processes together; workers: per process
ACCUMULATE = 1  # microbatches that a process computes before each update
BF16 = COMPILE = CHECKPOINTING = GPU is not None  # each can be switched off by itself
CHECKPOINT = Path(sys.argv[1] if sys.argv[1:] else "finetune_lora")  # how its folders' names begin
BASE = Path(sys.argv[2] if sys.argv[2:] else "train_fsdp")  # of the model to start from
ADAPTERS = dcp_state.StateDictOptions(ignore_frozen_params=True, strict=False)


def with_adapters(model, rank=8, alpha=8):  # what they add is scaled by alpha / rank
    """Freeze a model and add B A x to its blocks' linear layers; call it before fully_shard."""
    model.requires_grad_(False)
    for block in model.blocks:
        for layer in (block.qkv, block.out, block.up, block.down):
            layer.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
            layer.b = nn.Parameter(torch.zeros(layer.out_features, rank))  # so it starts as W x
            layer.register_forward_hook(
                lambda own, x, out: out + alpha / rank * (x[0] @ own.a.T @ own.b.T)
            )
    return model


def make_model(device, mesh):
    with torch.device("meta"):  # shapes only: no device ever holds the whole model
        model = with_adapters(GPT(checkpointing=CHECKPOINTING))
    policy = MixedPrecisionPolicy(torch.bfloat16 if BF16 else None, torch.float32)  # float32 sums
    for block in model.blocks:
        if COMPILE:
            block.compile()  # the blocks are equal, so only one is compiled
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)  # whole only while it computes
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)  # the rest: embedding, last norm, head
    model.to_empty(device=device)  # memory for this rank's shards
    torch.manual_seed(0)
    first = with_adapters(GPT()) if dist.get_rank() == 0 else nn.Module()  # whole, on rank 0 only
    copy_from_rank_0(first, model)
    base = {name: value for name, value in model.state_dict().items() if name.endswith("weight")}
    dcp.load({"model": base}, checkpoint_id=newest(BASE))  # each rank reads into its shards
    return model


def state_of(model, optimizer, *progress):
    weights, moments = dcp_state.get_state_dict(model, optimizer, options=ADAPTERS)
    return {"model": weights, "optimizer": moments, "progress": list(progress)}


def main():
    device = join()
    assert newest(BASE), f"no model {BASE}-NUMBER: train it with train_fsdp.py, or give its name"
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("data",))
    model = make_model(device, mesh)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=4e-3, fused=True)  # of the shards
    train, check = make_datasets(bytes.upper)
    loader = make_loader(train, BATCH // ACCUMULATE, mesh["data"], WORKERS, drop_last=True)
    check_loader = make_loader(check, BATCH, mesh["data"], WORKERS, shuffle=False)
    steps = len(loader) // ACCUMULATE  # of an epoch
    done, lost, seen = 0, 0.0, 0  # steps since the start; this epoch's losses and tokens, of all ranks
    if folder := newest(CHECKPOINT):
        state = state_of(model, optimizer, done, lost, seen)
        dcp.load(state, checkpoint_id=folder)  # each process reads what its shards need
        dcp_state.set_model_state_dict(model, state["model"], options=ADAPTERS)
        dcp_state.set_optimizer_state_dict(model, optimizer, state["optimizer"])
        done, lost, seen = state["progress"]
    stopping, writing = False, None
    savers = dist.new_group(backend="gloo")  # its thread would disturb the training in a shared group
    while done < EPOCHS * steps and not stopping:
        epoch, first = divmod(done, steps)
        loader.sampler.set_epoch(epoch)  # without it, every epoch has the same order
        batches = itertools.islice(loader, first * ACCUMULATE, None)  # drops those of before a stop
        total, tokens, began = torch.zeros((), device=device), 0, time.perf_counter()
        while done < (epoch + 1) * steps and not stopping:
            torch.manual_seed(done * world + rank)  # dropout: each rank its own, also resumed
            parts = list(itertools.islice(batches, ACCUMULATE))
            scored, stopping = agreed(sum(count(targets) for _, targets in parts))
            for part in parts:
                # Every backward pass reduce-scatters, so gradients stay sharded. To do so only in the
                # last, set_requires_gradient_sync(False) keeps them whole: 28 GB for 7B parameters.
                loss = model(*(tensor.to(device, non_blocking=True) for tensor in part))
                # FSDP averages over the ranks; so scaled, that is the mean over all tokens.
                (loss * world / scored).backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the whole gradient
            optimizer.step()
            optimizer.zero_grad()
            done, tokens = done + 1, tokens + scored
        dist.all_reduce(total)  # every rank makes this call; one logs
        lost, seen = lost + total.item(), seen + tokens  # .item() waits for the GPU
        seconds = time.perf_counter() - began
        if done == (epoch + 1) * steps:  # else a signal has ended the epoch
            means = lost / seen, mean_loss(model, check_loader, device)
            text = f"epoch {epoch + 1}: loss {means[0]:.6f}, validation {means[1]:.6f}"
            report(text, tokens, "tokens", seconds, model.flops_per_token())
            lost, seen = 0.0, 0
        if writing:
            writing.result()  # the last checkpoint, of which a thread has written a copy
        state = state_of(model, optimizer, done, lost, seen)
        folder = f"{CHECKPOINT}-{done}"
        writing = dcp.async_save(state, checkpoint_id=folder, process_group=savers)
    if writing:
        writing.result()
    if not stopping:
        say(f"the model writes:\n{sample(model, device)}")  # all ranks sample, and one speaks
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

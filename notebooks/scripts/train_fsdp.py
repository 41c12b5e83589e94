"""Train a GPT that is sharded over all devices: FSDP2, one process per device, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_fsdp.py  (1 instead of 2 to debug)
Several nodes:   sbatch train.sbatch, with this file's name in it
It saves and ends on SIGTERM and SIGUSR1, and the same command resumes, with any number of processes."""

import sys
from pathlib import Path

import job
import torch
import torch.distributed as dist
from gpt import GPT, count, make_datasets, mean_loss, sample  # yours: a model of blocks, and its data
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

EPOCHS, BATCH, WORKERS = 2, 32, 0  # batch: of all processes together; workers: per process
RATE, CLIP = 8e-3, 1.0  # the highest learning rate, the largest norm of a gradient
ACCUMULATE = 1  # microbatches that a process computes before each update
BF16 = COMPILE = CHECKPOINTING = job.GPU is not None  # each can be switched off by itself
CHECKPOINT = Path(sys.argv[1] if sys.argv[1:] else "train_fsdp")  # how its folders' names begin


def make_model(device, mesh):
    with torch.device("meta"):  # shapes only: no device ever holds the whole model
        model = GPT(checkpointing=CHECKPOINTING)
    policy = MixedPrecisionPolicy(torch.bfloat16 if BF16 else None, torch.float32)  # float32 sums
    for block in model.blocks:
        if COMPILE:
            block.compile()  # the blocks are equal, so only one is compiled
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)  # whole only while it computes
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)  # the rest: embedding, last norm, head
    model.to_empty(device=device)  # memory for this rank's shards
    torch.manual_seed(0)
    first = GPT() if dist.get_rank() == 0 else nn.Module()  # whole, on rank 0 only
    job.copy_from_rank_0(first, model)
    return model


@record  # torchrun then shows this process's error, not only its exit status
def main():
    device = job.join()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    world, rank, ranks = mesh.size(), mesh["data"].get_local_rank(), mesh["data"].size()
    if ranks * ACCUMULATE > BATCH:
        job.end(f"a batch of {BATCH} is too small for {ranks} ranks with {ACCUMULATE} microbatches")
    model = make_model(device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)  # of the shards
    train, check = make_datasets()
    length = len(train) // BATCH  # steps of an epoch
    peak = job.PEAK["bf16" if BF16 else "fp32"]
    run = job.Run(CHECKPOINT, {"size": BATCH, "of an epoch": length}, model.flops_per_token(), peak)
    run.resume(model, optimizer)
    todo = job.places(len(train), BATCH, EPOCHS, run.done, rank, ranks)
    loader = job.make_loader(train, todo, WORKERS)
    check_loader = job.make_loader(check, job.parts(len(check), BATCH, rank, ranks), WORKERS)
    for batch in loader:
        torch.manual_seed(run.done * ranks + rank)  # dropout: of each part of each batch, also resumed
        scored, losses = job.total(count(batch[1])), torch.zeros((), device=device)
        for part in zip(*(tensor.tensor_split(ACCUMULATE) for tensor in batch), strict=True):
            # Every backward pass reduce-scatters, so gradients stay sharded. To do so only in the
            # last, set_requires_gradient_sync(False) keeps them whole: 28 GB for 7B parameters.
            loss = model(*(tensor.to(device, non_blocking=True) for tensor in part))
            # FSDP averages over the ranks; so scaled, that is the mean over all tokens.
            (loss * world / scored).backward()
            losses += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor()  # of the whole gradient
        for group in optimizer.param_groups:
            group["lr"] = RATE * job.cosine(run.done, EPOCHS * length)
        optimizer.step()
        optimizer.zero_grad()
        due = run.look(losses, scored, norm, group["lr"])
        if run.done % length == 0:
            run.end_epoch(mean_loss(model, check_loader, device))
        if due or run.done == EPOCHS * length:
            run.save(model, optimizer)
        if run.stopping:
            break
    run.finish()
    if not run.stopping:
        job.say(f"the model writes:\n{sample(model, device)}")  # all ranks sample, and one speaks
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

"""Train a GPT in every parallel dimension at once, in plain PyTorch: flags arrange the processes.

One machine:     torchrun --standalone --nproc-per-node=8 train_gpt.py --pp 2 --shard 2 --tp 2
Several nodes:   sbatch train.sbatch, with train_gpt.py, flags and --checkpoint "$CHECKPOINT" in it

--tp T         splits each layer over T devices       (innermost: keep its many exchanges in one node)
--cp C         splits each sequence over C devices    (keys and values travel around a ring of them)
--shard S      splits the batch, and stores weights, gradients and moments once on S x C devices: FSDP
--replicate R  repeats all that R times and splits the batch further: HSDP, with shards inside a node
--pp P         splits the list of blocks into stages  (outermost: it sends the least)

Losses and gradients are those of one device for every mesh, and any mesh resumes what another saved.
It saves and ends on SIGTERM and SIGUSR1; the same command, or one with another mesh, resumes."""

import argparse
import os
import sys
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path

import job
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from gpt import END, GPT, LENGTH, PADDING, Block, count, make_datasets  # yours
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

RATE, CLIP, WORKERS = 8e-3, 1.0, 0  # the highest learning rate, the largest norm; loaders per process
MESH = ("pp", "replicate", "shard", "cp", "tp")  # neighbours in the last one are neighbouring ranks
ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}  # per process
TWO_STAGES = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}

# --- flags


def refuse(text):
    """End with one line, before any process waits for another."""
    sys.exit(text if os.environ.get("RANK", "0") == "0" else 1)


def read_flags(arguments=None):
    described = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**described)
    parser.error = refuse
    number, switch = {"type": int}, {"action": argparse.BooleanOptionalAction, "default": bool(job.GPU)}
    for name in MESH:
        parser.add_argument(f"--{name}", **number, default=1)
    parser.add_argument("--schedule", choices=ONE_STAGE | TWO_STAGES, default="1f1b", help="of --pp")
    parser.add_argument("--microbatches", **number, help="per process; if not given, one per stage")
    parser.add_argument("--batch", **number, default=32, help="sequences per step, of all processes")
    parser.add_argument("--epochs", **number, default=2)
    parser.add_argument("--steps", **number, help="end after this many, though the epochs go on")
    parser.add_argument("--width", **number, default=64)
    parser.add_argument("--blocks", **number, default=4)
    parser.add_argument("--heads", **number, default=4)
    parser.add_argument("--packed", action="store_true", help="several documents in a row, kept apart")
    parser.add_argument("--bf16", **switch, help="compute in bfloat16; weights and sums stay float32")
    parser.add_argument("--compile", **switch, help="compile the block; all are equal")
    parser.add_argument("--recompute", **switch, help="activation checkpointing: saves memory")
    parser.add_argument("--checkpoint", type=Path, default="train_gpt", help="how its names begin")
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            refuse(f"--{name} {value}: at least 1")
    if args.pp == 1:
        args.schedule = "gpipe"  # one stage after the other
    args.stages = args.pp * (2 if args.schedule in TWO_STAGES else 1)
    args.microbatches = args.microbatches or args.stages
    check(args)
    return args


def check(args):
    """Refuse what does not fit together."""
    world = prod(getattr(args, name) for name in MESH)
    started = int(os.environ.get("WORLD_SIZE", world))
    if started != world:
        refuse(f"{' x '.join(f'--{name}' for name in MESH)} is {world}, but {started} processes run")
    if args.blocks < args.stages:
        refuse(f"--blocks {args.blocks} cannot fill {args.stages} stages")
    if args.schedule in ("1f1b", "zbv") and args.microbatches < args.stages:
        refuse(f"--schedule {args.schedule}: at least {args.stages} --microbatches, one per stage")
    if args.schedule == "interleaved" and args.microbatches % args.pp:
        refuse(f"--schedule interleaved: --microbatches must be a multiple of --pp {args.pp}")
    if args.schedule == "zbv" and args.compile:
        refuse("--schedule zbv splits backward passes, which torch.compile can't: add --no-compile")
    if args.batch % (parts := args.replicate * args.shard * args.microbatches):
        refuse(f"--batch {args.batch}: a multiple of --replicate x --shard x --microbatches, {parts}")
    if args.width % (2 * args.heads) or args.heads % args.tp:
        refuse(f"--heads {args.heads}: must divide half of --width, and --tp must divide it")
    if LENGTH % (2 * args.cp * args.tp):
        refuse(f"{LENGTH} tokens: not divisible by 2 x --cp x --tp, {2 * args.cp * args.tp}")


# --- model


class Stage(nn.Module):
    """Blocks of a model by the names they have in it; the first stage embeds, the last one predicts."""

    def __init__(self, model, blocks, recompute):
        super().__init__()
        last = len(model.blocks) - 1
        self.embed = model.embed if 0 in blocks else None
        self.blocks = nn.ModuleDict({str(k): model.blocks[k] for k in blocks})
        self.norm, self.head = (model.norm, model.head) if last in blocks else (None, None)
        self.recompute = recompute

    def forward(self, x, documents):
        x = self.embed(x) if self.embed else x
        for block in self.blocks.values():
            if self.recompute:
                x = checkpoint(block, x, documents=documents, use_reentrant=False)
            else:
                x = block(x, documents=documents)
        return self.head(self.norm(x)) if self.head else x


def make_model(args, device, mesh, ring):
    """Return this process's shards of a model, its stages, and their numbers."""
    with torch.device("meta"):  # shapes only: no device ever holds the whole model
        whole = GPT(args.width, args.blocks, args.heads)
        shapes = GPT(args.width, args.blocks, args.heads)
    numbers = stages_of(args, mesh)
    cuts = [args.blocks * k // args.stages for k in range(args.stages + 1)]
    blocks = [range(cuts[k], cuts[k + 1]) for k in numbers]
    stages = [Stage(whole, own, args.recompute) for own in blocks]
    angles = Block(args.width, args.heads).angles[positions(ring)].to(device)
    for stage in stages:
        if args.tp > 1:
            split_layers(stage, mesh["tp"])
        for block in stage.blocks.values():
            alone = partial(attention, packed=args.packed)
            block.attend = partial(ring_attention, mesh=ring) if args.cp > 1 else alone
            if args.compile:
                block.compile()  # the blocks are equal, so only one is compiled
        shard(stage, args, mesh)
        stage.to_empty(device=device)  # memory for this process's shards
        for block in stage.blocks.values():
            block.angles = angles
    held = Stage(whole, [k for own in blocks for k in own], args.recompute)
    fill(held, shapes, device)
    return held, stages, numbers


@torch.no_grad()
def fill(held, shapes, device):
    """Give the shards the weights that GPT() would begin with; only one layer at a time is whole."""
    torch.manual_seed(0)
    shards = dict(held.named_parameters())
    for name, layer in shapes.named_modules():
        if not (parameters := dict(layer.named_parameters(recurse=False))):
            continue
        layer.to_empty(device=device).reset_parameters()  # all of them, as all draw random numbers
        for key in parameters:
            if f"{name}.{key}" in shards:  # every process has made the same tensor, so none sends it
                own = shards[f"{name}.{key}"]
                place = {"device_mesh": own.device_mesh, "placements": own.placements}
                own.copy_(distribute_tensor(getattr(layer, key), **place, src_data_rank=None))
        layer.to("meta")


# --- mesh: --shard and --replicate


def make_mesh(args, device):
    """Return the mesh, in which FSDP shards over --shard x --cp, and the ring of --cp in it."""
    shape = args.pp, args.replicate, args.shard * args.cp, args.tp
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicate", "fsdp", "tp"))
    shape = mesh.size() // (args.cp * args.tp), args.cp, args.tp
    return mesh, init_device_mesh(device.type, shape, mesh_dim_names=("others", "cp", "tp"))["cp"]


def shard(stage, args, mesh):
    """Shard a stage over "fsdp"; its copies, one for each of --replicate, sum up their gradients."""
    how = {"mesh": mesh["replicate", "fsdp"] if args.replicate > 1 else mesh["fsdp"]}
    how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    # Whole only while it computes. A pipeline would gather it for every microbatch, so there it stays.
    how["reshard_after_forward"] = args.pp == 1
    for block in stage.blocks.values():
        fully_shard(block, **how)
    if stage.embed:
        fully_shard(stage.embed, **how)
    if stage.head:
        fully_shard([stage.norm, stage.head], **how)
    fully_shard(stage, **how)


# --- mesh: --tp


def split_layers(stage, mesh):
    """Split each layer; between layers each rank stores a part of the sequence, dimension 1."""
    part = Shard(1)
    columns, rows = tp.ColwiseParallel(input_layouts=part), tp.RowwiseParallel(output_layouts=part)
    plan = {"embed": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=part)}
    plan |= {"blocks.*.norm1": tp.SequenceParallel(), "blocks.*.qkv": columns, "blocks.*.out": rows}
    plan |= {"blocks.*.norm2": tp.SequenceParallel(), "blocks.*.up": columns, "blocks.*.down": rows}
    plan |= {"norm": tp.SequenceParallel(), "head": columns}  # logits of a part of the vocabulary
    own = {name: style for name, style in plan.items() if getattr(stage, name.split(".")[0])}
    tp.parallelize_module(stage, mesh, own)
    if stage.embed:
        # What it returns is still on its way; a compiled block would pass no gradient back through it.
        stage.embed.register_forward_hook(lambda embed, tokens, x: x.clone())


# --- --packed


def attention(q, k, v, is_causal, documents, packed):
    """Return causal attention. In a packed row a token sees those of its document only.

    Positions run on from one document to the next: rotary ones act by their differences alone.
    """
    mask = same(documents, documents).tril() if packed else None
    return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal and not packed)


def same(queries, keys):
    """Return which queries are in the document of which keys."""
    return queries[:, None, :, None] == keys[:, None, None, :]


# --- mesh: --cp


def zigzag(tokens, ring, rank):
    """Return a rank's tokens: an early piece and a late one, so that all have the same work."""
    pieces = tokens.chunk(2 * ring.size(), -1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], -1)


def positions(ring):
    return zigzag(torch.arange(LENGTH), ring, ring.get_local_rank())


def pass_on(tensor, mesh):
    """Return the tensor of the previous rank in the ring; gradients travel the other way."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    sizes = [[len(tensor) * (r == peer % ranks) for r in range(ranks)] for peer in (rank - 1, rank + 1)]
    return all_to_all_single_autograd(tensor.contiguous(), *sizes, mesh.get_group())


def attend(q, k, v, mask):
    """Return the attention to some of the keys, and the logarithm of its denominator."""
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -1e30)  # -inf is NaN for a query that sees none of these keys
    return scores.softmax(-1) @ v.float(), scores.logsumexp(-1, keepdim=True)


def ring_attention(q, k, v, is_causal, documents, mesh):
    """Return causal attention to all ranks' tokens: queries stay, keys and values go around."""
    rank, half, following = mesh.get_local_rank(), q.shape[2] // 2, torch.stack([k, v])
    seen, own = [], zigzag(documents, mesh, rank)
    for step in range(mesh.size()):
        (k, v), source = following, (rank - step) % mesh.size()  # whose keys these are
        if step + 1 < mesh.size():
            following = pass_on(following, mesh)  # travels while these are used
        mask = same(own, zigzag(documents, mesh, source))
        if source == rank:
            seen.append(attend(q, k, v, mask.tril()))
        elif source < rank:  # all queries come after the early keys, and before the late ones
            seen.append(attend(q, k[:, :, :half], v[:, :, :half], mask[..., :half]))
        else:  # only the late queries come after these keys, and after all of them
            values, sums = attend(q[:, :, half:], k, v, mask[..., half:, :])
            seen.append((pad(values, (0, 0, half, 0)), pad(sums, (0, 0, half, 0), value=-torch.inf)))
    values, sums = (torch.stack(parts) for parts in zip(*seen, strict=True))
    return (values * sums.softmax(0)).sum(0).type_as(q)


# --- mesh: --pp


def stages_of(args, mesh):
    """Return the numbers of this process's stages; with zbv they form a V, down the ranks and up."""
    rank = mesh["pp"].get_local_rank()
    if args.stages == args.pp:
        return [rank]
    return [rank, args.stages - 1 - rank] if args.schedule == "zbv" else [rank, rank + args.pp]


def make_pipeline(args, device, mesh, stages, numbers, loss_of):
    """Return the schedule that passes microbatches through the stages."""
    rows, length = args.batch // (args.replicate * args.shard * args.microbatches), LENGTH // args.cp
    with torch.device("meta"):  # what goes from stage to stage, so that none has to ask another
        tokens = torch.empty(rows, length, dtype=torch.long)
        hidden = torch.empty(rows, length // args.tp, args.width, requires_grad=True)
        logits = torch.empty(rows, length, 256 // args.tp, requires_grad=True)
    if args.bf16:
        hidden, logits = hidden.bfloat16(), logits.bfloat16()
    shapes = [tokens, *[hidden] * (args.stages - 1), logits]
    place = {"num_stages": args.stages, "device": device, "group": mesh["pp"].get_group()}
    parts = [
        PipelineStage(stage, k, **place, input_args=shapes[k], output_args=shapes[k + 1])
        for stage, k in zip(stages, numbers, strict=True)
    ]
    options = {"loss_fn": loss_of, "scale_grads": False}  # losses are sums, so gradients are sums
    if args.schedule in ONE_STAGE:
        return ONE_STAGE[args.schedule](*parts, args.microbatches, **options)
    return TWO_STAGES[args.schedule](parts, args.microbatches, **options)


# --- one step


def make_pass(args, device, mesh, ring, stages, numbers):
    """Return a function that passes a batch through the model."""
    is_first, is_last, place = 0 in numbers, args.stages - 1 in numbers, positions(ring)

    def loss_of(logits, targets):
        if args.tp > 1:
            logits = DTensor.from_local(logits, mesh["tp"], [Shard(-1)])
        loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss.to_local().clone() if args.tp > 1 else loss  # zbv detaches it, which a view refuses

    if args.pp > 1:
        pipeline = make_pipeline(args, device, mesh, stages, numbers, loss_of)

    def compute(batch, training=True):
        """Return the sum of losses and the number of tokens, 0 but in the last stage.

        In training, the sum's gradients are added to the weights'.
        """
        inputs, targets = (tensor[:, place] for tensor in batch)  # this rank's part of each sequence
        tokens = count(targets) if is_last else 0
        documents = (batch[0] == END).cumsum(1) * args.packed  # which one each token is in, else 0
        tensors = inputs, targets, documents
        inputs, targets, documents = (x.to(device, non_blocking=True) for x in tensors)
        losses = [torch.zeros((), device=device)]
        training = training or args.schedule == "zbv"  # which cannot do without gradients
        with tp.loss_parallel(), torch.set_grad_enabled(training):
            if args.pp > 1:
                given = {"documents": documents, "return_outputs": False}  # any stage has the samples
                given |= {"target": targets, "losses": losses} if is_last else {}
                step = pipeline.step if training else pipeline.eval
                step(*([inputs] if is_first else []), **given)
            else:  # gradients are reduced after each microbatch, so that they are never whole
                parts = (x.chunk(args.microbatches) for x in (inputs, targets, documents))
                for part, target, document in zip(*parts, strict=True):
                    losses.append(loss_of(stages[0](part, document), target))
                    if training:
                        losses[-1].backward()
        return torch.stack(losses).sum().detach(), tokens

    return compute


@torch.no_grad()
def clip(parameters, scale, mesh):
    """Scale the gradients, then limit their norm, as one vector of all processes; return the norm."""
    gradients = [parameter.grad.mul_(scale) for parameter in parameters]
    square = nn.utils.get_total_norm(gradients).full_tensor() ** 2  # of this process's stages
    dist.all_reduce(square, group=mesh["pp"].get_group())
    nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())
    return square.sqrt()


# --- loop


def validate(held, optimizer, compute, loader, device):
    """Return the mean loss of all tokens."""
    held.eval()
    sums = sum(torch.tensor(compute(batch, training=False), device=device) for batch in loader)
    held.train()
    optimizer.zero_grad()  # zbv has made some
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@record  # torchrun then shows this process's error, not only its exit status
def main(arguments=None):
    args = read_flags(arguments)
    train, checked = (dataset.tensors for dataset in make_datasets(packed=args.packed))
    length = len(train[0]) // args.batch  # steps of an epoch
    if not length:
        refuse(f"--batch {args.batch}: there are only {len(train[0])} sequences")
    device = job.join()
    mesh, ring = make_mesh(args, device)
    held, stages, numbers = make_model(args, device, mesh, ring)
    compute = make_pass(args, device, mesh, ring, stages, numbers)
    parameters = list(held.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)  # of the shards
    with torch.device("meta"):
        operations = GPT(args.width, args.blocks, args.heads).flops_per_token()
    steps = args.epochs * length
    last = min(steps, args.steps or steps)
    sizes = {"size": args.batch, "of an epoch": length, "blocks": args.blocks, "heads": args.heads}
    peak = job.PEAK["bf16" if args.bf16 else "fp32"]
    run = job.Run(args.checkpoint, sizes, operations, peak, copies=args.tp, last=last)
    run.resume(held, optimizer)
    # The ranks of "pp", "cp" and "tp" have the same samples; FSDP averages over all of "averaged".
    averaged = args.replicate * args.shard * args.cp
    place = mesh["replicate"].get_local_rank() * mesh["fsdp"].size() + mesh["fsdp"].get_local_rank()
    data = place // args.cp, args.replicate * args.shard  # which samples, and of how many
    todo = job.places(len(train[0]), args.batch, args.epochs, run.done, *data)
    todo = islice(todo, max(0, last - run.done))
    loader = job.make_loader(TensorDataset(*train), todo, WORKERS)
    # A pipeline has one size of batches, so the last batch is filled up with padding.
    rows = (0, 0, 0, -len(checked[0]) % args.batch)
    checked = TensorDataset(pad(checked[0], rows), pad(checked[1], rows, value=PADDING))
    check_loader = job.make_loader(checked, job.parts(len(checked), args.batch, *data), WORKERS)
    for batch in loader:
        torch.manual_seed(run.done * averaged + place)  # dropout: of each part, also resumed
        losses, tokens = compute(batch)
        scored = job.total(tokens)  # the ranks of "tp" have counted the same ones
        norm = clip(parameters, averaged * args.tp / scored, mesh)  # of the mean loss of all tokens
        for group in optimizer.param_groups:
            group["lr"] = RATE * job.cosine(run.done, steps)
        optimizer.step()
        optimizer.zero_grad()
        due = run.look(losses, scored, norm, group["lr"])
        if run.done % length == 0:
            run.end_epoch(validate(held, optimizer, compute, check_loader, device))
        if due or run.done == last:
            run.save(held, optimizer)
        if run.stopping:
            break
    run.finish()
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

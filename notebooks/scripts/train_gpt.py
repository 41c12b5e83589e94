"""Train a GPT in every parallel dimension at once, in plain PyTorch: flags arrange the processes.

One machine:     torchrun --standalone --nproc-per-node=8 train_gpt.py --pp 2 --shard 2 --tp 2
Several nodes:   sbatch train.sbatch, with train_gpt.py, flags and --checkpoint "$CHECKPOINT" in it

--tp T         splits each layer over T devices       (innermost: keep its many exchanges in one node)
--cp C         splits each sequence over C devices    (keys and values travel around a ring of them)
--shard S      splits the batch, and stores weights, gradients and moments once on S x C devices: FSDP
               (if not given, over all processes that the others leave)
--replicate R  repeats all that R times and splits the batch further: HSDP, with shards inside a node
--pp P         splits the list of blocks into stages  (outermost: it sends the least)

Losses and gradients are those of one device for every mesh, and any mesh resumes what another saved.
It saves and ends on SIGTERM and SIGUSR1; the same command, or one with another mesh, resumes.

It needs PyTorch 2.10 or newer. No GPU has run it yet, where --bf16, --compile and --recompute are the
defaults: all equalities were measured on CPUs. Compare your mesh with one process first."""

import argparse
import os
from functools import partial
from itertools import islice
from math import prod

import job
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from gpt import END, GPT, LENGTH, PADDING, count, make_datasets  # yours
from job import refuse
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
from torch.utils.data import TensorDataset

RATE, CLIP, WORKERS = 8e-3, 1.0, 0  # the highest learning rate, the largest norm; loaders per process
MESH = ("pp", "replicate", "shard", "cp", "tp")  # neighbours in the last one are neighbouring ranks

# --- flags


def read_flags(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = refuse
    number, switch = {"type": int}, {"action": argparse.BooleanOptionalAction, "default": bool(job.GPU)}
    for name in MESH:
        parser.add_argument(f"--{name}", **number, default=None if name == "shard" else 1)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of --pp")
    parser.add_argument("--microbatches", **number, help="per process")
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
    name = {"type": job.start_of, "default": "train_gpt"}
    parser.add_argument("--checkpoint", **name, help="how its names begin")
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            refuse(f"--{name} {value}: at least 1")
    args.stages = args.pp * (2 if args.pp > 1 and args.schedule in ("interleaved", "zbv") else 1)
    args.microbatches = args.microbatches or args.stages
    check(args)
    return args


def check(args):
    """Refuse what does not fit together."""
    others = prod(getattr(args, name) or 1 for name in MESH)
    started = int(os.environ.get("WORLD_SIZE", others))
    args.shard = args.shard or max(1, started // others)
    world = prod(getattr(args, name) for name in MESH)
    if started != world:
        refuse(f"{' x '.join(f'--{name}' for name in MESH)} is {world}, but {started} processes run")
    if args.pp > 1:
        check_schedule(args)
    if args.batch % (parts := args.replicate * args.shard * args.microbatches):
        refuse(f"--batch {args.batch}: a multiple of --replicate x --shard x --microbatches, {parts}")
    if args.width % (2 * args.heads):
        refuse(f"--heads {args.heads}: must divide half of --width {args.width}")
    if args.heads % args.tp:
        refuse(f"--tp {args.tp}: must divide --heads {args.heads}")
    if args.cp * args.tp > 1 and LENGTH % (2 * args.cp * args.tp):
        refuse(f"{LENGTH} tokens: not divisible by 2 x --cp x --tp, {2 * args.cp * args.tp}")


# --- model


def make_model(args, device, mesh, ring):
    """Return a model of which this process has its shards."""
    with torch.device("meta"):  # shapes only: no device ever holds the whole model
        sizes = args.width, args.blocks, args.heads
        model, shapes = GPT(*sizes, args.recompute), GPT(*sizes)
    if args.pp > 1:
        model = cut(model, args, mesh)
        for stage in model.stages:
            prepare(stage, args, device, mesh, ring)
    else:
        prepare(model, args, device, mesh, ring)
    model.operations = shapes.flops_per_token()
    fill(model, shapes, device)
    if args.cp > 1:
        for block in model.blocks.children():
            block.angles = block.angles[positions(ring)]
    return model


def prepare(model, args, device, mesh, ring):
    """Split a model on the meta device over the mesh, and give it memory for this process's shards."""
    if args.tp > 1:
        split_layers(model, mesh["tp"])
    for block in model.blocks.children():
        block.attend = partial(attention, packed=args.packed)
        if args.cp > 1:
            block.attend = partial(ring_attention, mesh=ring)
        if args.compile:
            block.compile()  # the blocks are equal, so only one is compiled
    shard(model, args, mesh)
    model.to_empty(device=device)


@torch.no_grad()
def fill(model, shapes, device):
    """Give the shards what GPT() would begin with; only one layer at a time is whole."""
    torch.manual_seed(0)
    empty = dict([*model.named_parameters(), *model.named_buffers()])
    for name, layer in shapes.named_modules():  # all of them, as all draw random numbers
        for key, whole in job.begun(layer, device).items():
            own = empty.pop(f"{name}.{key}".strip("."), None)
            if isinstance(own, DTensor):  # every process has made the same tensor, so none sends it
                whole = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
            if own is not None:
                own.copy_(whole)
        layer.to("meta")
    job.refuse_empty(empty)


# --- mesh: --shard and --replicate


def make_mesh(args, device):
    """Return the mesh, which has --shard x --cp as "fsdp", and the ring of --cp."""
    shape = args.pp, args.replicate, args.shard * args.cp, args.tp
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicate", "fsdp", "tp"))
    ring = mesh.size() // (args.cp * args.tp), args.cp, args.tp
    ring = init_device_mesh(device.type, ring, mesh_dim_names=("others", "cp", "tp"))["cp"]
    return mesh, ring


def shard(model, args, mesh):
    """Shard a model over "fsdp"; its copies, one for each of --replicate, sum up their gradients."""
    how = {"mesh": mesh["replicate", "fsdp"] if args.replicate > 1 else mesh["fsdp"]}
    how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    if args.pp > 1:
        how["reshard_after_forward"] = False  # a pipeline would gather it for every microbatch
    for block in model.blocks.children():
        fully_shard(block, **how)  # whole only while it computes
    fully_shard(model.embed, **how)
    fully_shard([model.norm, model.head], **how)
    fully_shard(model, **how)


# --- mesh: --tp


def split_layers(model, mesh):
    """Split each layer; between layers each rank stores a part of the sequence, dimension 1."""
    part = Shard(1)
    columns, rows = tp.ColwiseParallel(input_layouts=part), tp.RowwiseParallel(output_layouts=part)
    plan = {"embed": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=part)}
    plan |= {"blocks.*.norm1": tp.SequenceParallel(), "blocks.*.qkv": columns, "blocks.*.out": rows}
    plan |= {"blocks.*.norm2": tp.SequenceParallel(), "blocks.*.up": columns, "blocks.*.down": rows}
    plan |= {"norm": tp.SequenceParallel(), "head": columns}  # logits of a part of the vocabulary
    # In a stage, not all are there; a head that shares its weight with the embedding is.
    there = {name.split(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    own = {name: style for name, style in plan.items() if name.split(".")[0] in there}
    tp.parallelize_module(model, mesh, own)
    if "embed" in there:
        # What it returns is still on its way; a compiled block would pass no gradient back through it.
        model.embed.register_forward_hook(lambda embed, tokens, x: x.clone())


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

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,  # with two stages per process
    "zbv": ScheduleZBVZeroBubble,  # with two as well, in a V
}


def check_schedule(args):
    """Refuse what does not fit a schedule."""
    if args.blocks < args.stages:
        refuse(f"--blocks {args.blocks} cannot fill {args.stages} stages")
    if args.schedule in ("1f1b", "zbv") and args.microbatches < args.stages:
        refuse(f"--schedule {args.schedule}: at least {args.stages} --microbatches, one per stage")
    if args.schedule == "interleaved" and args.microbatches % args.pp:
        refuse(f"--schedule interleaved: --microbatches must be a multiple of --pp {args.pp}")
    if args.schedule == "zbv" and args.compile:
        refuse("--schedule zbv splits backward passes, which torch.compile can't: add --no-compile")


class Stage(GPT):
    """Blocks of a model by the names they have in it; the first stage embeds, the last one predicts."""

    def __init__(self, model, blocks):
        nn.Module.__init__(self)
        self.checkpointing = model.checkpointing
        last, ends = len(model.blocks) - 1, (model.norm, model.head)
        self.embed = model.embed if 0 in blocks else nn.Identity()
        self.blocks = nn.ModuleDict({str(k): model.blocks[k] for k in blocks})
        self.norm, self.head = ends if last in blocks else (nn.Identity(), nn.Identity())


def stages_of(args, mesh):
    """Return the numbers of this process's stages; with zbv they form a V, down the ranks and up."""
    rank = mesh["pp"].get_local_rank()
    if args.stages == args.pp:
        return [rank]
    return [rank, args.stages - 1 - rank] if args.schedule == "zbv" else [rank, rank + args.pp]


def cut(model, args, mesh):
    """Return what this process has of a model, whose `stages` it will compute."""
    cuts = [args.blocks * k // args.stages for k in range(args.stages + 1)]
    blocks = [range(cuts[k], cuts[k + 1]) for k in stages_of(args, mesh)]
    held = Stage(model, [k for own in blocks for k in own])
    held.stages = [Stage(model, own) for own in blocks]
    return held


def make_pipeline(args, device, mesh, stages, loss_of):
    """Return a function that passes a batch through the stages."""
    numbers = stages_of(args, mesh)
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
    own = parts if parts[1:] else parts[0]
    # The losses of microbatches are sums, so their gradients are added up, and not divided.
    pipeline = SCHEDULES[args.schedule](own, args.microbatches, loss_fn=loss_of, scale_grads=False)

    def pass_through(inputs, targets, documents):
        """Return the losses of the microbatches, in the last stage only."""
        losses, given = [], {"documents": documents, "return_outputs": False}
        if args.stages - 1 in numbers:
            given |= {"target": targets, "losses": losses}
        step = pipeline.step if torch.is_grad_enabled() else pipeline.eval
        step(*([inputs] if 0 in numbers else []), **given)  # any stage has the samples
        return losses

    return pass_through


# --- one step


def make_pass(args, device, mesh, ring, model):
    """Return a function that passes a batch through the model."""

    def loss_of(logits, targets):
        if args.tp > 1:
            logits = DTensor.from_local(logits, mesh["tp"], [Shard(-1)])
        loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss.to_local().clone() if args.tp > 1 else loss  # zbv detaches it, which a view refuses

    if args.pp > 1:
        pass_through = make_pipeline(args, device, mesh, model.stages, loss_of)

    def compute(batch, training=True):
        """Return the sum of losses and the number of tokens; add up gradients, if in training."""
        inputs, targets = batch
        documents = (inputs == END).cumsum(1) * args.packed  # which one each token is in, else 0
        if args.cp > 1:  # this rank's part of each sequence
            inputs, targets = inputs[:, positions(ring)], targets[:, positions(ring)]
        tokens = count(targets)
        tensors = [x.to(device, non_blocking=True) for x in (inputs, targets, documents)]
        losses = [torch.zeros((), device=device)]
        with tp.loss_parallel(), torch.set_grad_enabled(training or args.schedule == "zbv"):
            if args.pp > 1:
                losses += pass_through(*tensors)
                tokens *= len(losses) > 1  # counted where their losses are
            else:
                # Gradients are reduced after each microbatch, so that they are never whole.
                parts = (x.chunk(args.microbatches) for x in tensors)
                for part, target, document in zip(*parts, strict=True):
                    losses.append(loss_of(model(part, documents=document), target))
                    if training:
                        losses[-1].backward()
        return torch.stack(losses).sum().detach(), tokens

    return compute


@torch.no_grad()
def clip(parameters, scale, pp):
    """Scale the gradients, then limit their norm, as one vector of all processes; return the norm."""
    gradients = [parameter.grad.mul_(scale) for parameter in parameters]
    norm = nn.utils.get_total_norm(gradients).full_tensor()
    dist.all_reduce(square := norm**2, group=pp.get_group())  # the stages' gradients are one vector
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
    return norm


# --- loop


def validate(model, compute, loader, device):
    """Return the mean loss of all tokens."""
    model.eval()
    sums = sum(torch.tensor(compute(batch, False), device=device) for batch in loader)
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train(args, device, mesh, ring, model, sets):
    """Train a model, and return its `job.Run`."""
    compute = make_pass(args, device, mesh, ring, model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)  # of the shards
    train, checked = sets
    length = len(train) // args.batch  # steps of an epoch
    steps = args.epochs * length
    last = job.last_step(args.steps, steps)
    sizes = {"size": args.batch, "of an epoch": length, "blocks": args.blocks, "heads": args.heads}
    peak = job.PEAK["bf16" if args.bf16 else "fp32"]
    run = job.Run(args.checkpoint, sizes, model.operations, peak, last=last, copies=args.tp)
    run.resume(model, optimizer)
    rank = mesh["replicate"].get_local_rank() * mesh["fsdp"].size() + mesh["fsdp"].get_local_rank()
    ranks = args.replicate * args.shard  # with samples of their own: those of "pp", "cp", "tp" share
    todo = job.places(len(train), args.batch, args.epochs, run.done, rank // args.cp, ranks)
    todo = islice(todo, max(0, last - run.done))
    loader = job.make_loader(train, todo, WORKERS)
    # All batches have one size, so the last one is filled up with padding.
    (inputs, targets), rows = checked.tensors, (0, 0, 0, -len(checked) % args.batch)
    checked = TensorDataset(pad(inputs, rows), pad(targets, rows, value=PADDING))
    places = job.parts(len(checked), args.batch, rank // args.cp, ranks)
    check_loader = job.make_loader(checked, places, WORKERS)
    for batch in loader:
        torch.manual_seed(run.done * ranks * args.cp + rank)  # dropout: of each part, also resumed
        losses, tokens = compute(batch)
        scored = job.total(tokens)  # by the ranks of "tp" more than once
        # FSDP averages over its ranks; so scaled, that is the mean over all tokens.
        norm = clip(parameters, ranks * args.cp * args.tp / scored, mesh["pp"])
        for group in optimizer.param_groups:
            group["lr"] = RATE * job.cosine(run.done, steps)
        optimizer.step()
        optimizer.zero_grad()
        due = run.look(losses, scored, norm, group["lr"])
        if run.done % length == 0:
            run.end_epoch(validate(model, compute, check_loader, device))
            if args.pp > 1:
                optimizer.zero_grad()  # zbv has made some
        if due or run.done == last:
            run.save(model, optimizer)
        if run.stopping:
            break
    return run


@record  # torchrun then shows this process's error, not only its exit status
def main(arguments=None):
    args = read_flags(arguments)
    sets = make_datasets(packed=args.packed)
    if args.batch > len(sets[0]):
        refuse(f"--batch {args.batch}: there are only {len(sets[0])} sequences")
    device = job.join()
    mesh, ring = make_mesh(args, device)
    model = make_model(args, device, mesh, ring)
    run = train(args, device, mesh, ring, model, sets)
    run.finish()
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

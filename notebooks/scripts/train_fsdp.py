"""Train a GPT that is sharded over all devices: FSDP2, one process per device, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_fsdp.py  (1 instead of 2 to debug)
Several nodes:   sbatch train.sbatch, with train_fsdp.py, flags and --checkpoint "$CHECKPOINT" in it

--shard S      splits the batch, and stores weights, gradients and moments once on S devices: FSDP
               (if not given, over all processes)
--replicate R  repeats all that R times and splits the batch further: HSDP, with shards inside a node

It is what is left of train_gpt.py without its other dimensions. Losses and gradients are those of one
device, and any number of processes resumes what another saved: it saves and ends on SIGTERM and
SIGUSR1, and the same command resumes. It needs PyTorch 2.10 or newer."""

import argparse
import os
from itertools import islice
from math import prod

import job
import torch
import torch.distributed as dist
from gpt import GPT, PADDING, count, make_datasets  # yours
from job import refuse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset

RATE, CLIP, WORKERS = 8e-3, 1.0, 0  # the highest learning rate, the largest norm; loaders per process
MESH = ("replicate", "shard")  # neighbours in the last one are neighbouring ranks

# --- flags


def read_flags(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = refuse
    number, switch = {"type": int}, {"action": argparse.BooleanOptionalAction, "default": bool(job.GPU)}
    for name in MESH:
        parser.add_argument(f"--{name}", **number, default=None if name == "shard" else 1)
    parser.add_argument("--microbatches", **number, help="per process")
    parser.add_argument("--batch", **number, default=32, help="sequences per step, of all processes")
    parser.add_argument("--epochs", **number, default=2)
    parser.add_argument("--steps", **number, help="end after this many, though the epochs go on")
    parser.add_argument("--width", **number, default=64)
    parser.add_argument("--blocks", **number, default=4)
    parser.add_argument("--heads", **number, default=4)
    parser.add_argument("--bf16", **switch, help="compute in bfloat16; weights and sums stay float32")
    parser.add_argument("--compile", **switch, help="compile the block; all are equal")
    parser.add_argument("--recompute", **switch, help="activation checkpointing: saves memory")
    name = {"type": job.start_of, "default": "train_fsdp"}
    parser.add_argument("--checkpoint", **name, help="how its names begin")
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            refuse(f"--{name} {value}: at least 1")
    args.microbatches = args.microbatches or 1
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
    if args.batch % (parts := args.replicate * args.shard * args.microbatches):
        refuse(f"--batch {args.batch}: a multiple of --replicate x --shard x --microbatches, {parts}")
    if args.width % (2 * args.heads):
        refuse(f"--heads {args.heads}: must divide half of --width {args.width}")


# --- model


def make_model(args, device, mesh):
    """Return a model of which this process has its shards."""
    with torch.device("meta"):  # shapes only: no device ever holds the whole model
        sizes = args.width, args.blocks, args.heads
        model, shapes = GPT(*sizes, args.recompute), GPT(*sizes)
    prepare(model, args, device, mesh)
    model.operations = shapes.flops_per_token()
    fill(model, shapes, device)
    return model


def prepare(model, args, device, mesh):
    """Split a model on the meta device over the mesh, and give it memory for this process's shards."""
    for block in model.blocks.children():
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
    """Return the mesh, of --replicate x --shard."""
    shape = args.replicate, args.shard
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "fsdp"))


def shard(model, args, mesh):
    """Shard a model over "fsdp"; its copies, one for each of --replicate, sum up their gradients."""
    how = {"mesh": mesh["replicate", "fsdp"] if args.replicate > 1 else mesh["fsdp"]}
    how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    for block in model.blocks.children():
        fully_shard(block, **how)  # whole only while it computes
    fully_shard(model.embed, **how)
    fully_shard([model.norm, model.head], **how)
    fully_shard(model, **how)


# --- one step


def make_pass(args, device, model):
    """Return a function that passes a batch through the model."""

    def loss_of(logits, targets):
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def compute(batch, training=True):
        """Return the sum of losses and the number of tokens; add up gradients, if in training."""
        inputs, targets = batch
        tokens = count(targets)
        tensors = [x.to(device, non_blocking=True) for x in (inputs, targets)]
        losses = [torch.zeros((), device=device)]
        with torch.set_grad_enabled(training):
            # Gradients are reduced after each microbatch, so that they are never whole.
            parts = (x.chunk(args.microbatches) for x in tensors)
            for part, target in zip(*parts, strict=True):
                losses.append(loss_of(model(part), target))
                if training:
                    losses[-1].backward()
        return torch.stack(losses).sum().detach(), tokens

    return compute


@torch.no_grad()
def clip(parameters, scale):
    """Scale the gradients, then limit their norm, as one vector of all processes; return the norm."""
    gradients = [parameter.grad.mul_(scale) for parameter in parameters]
    norm = nn.utils.get_total_norm(gradients).full_tensor()
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


def train(args, device, mesh, model, sets):
    """Train a model, and return its `job.Run`."""
    compute = make_pass(args, device, model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)  # of the shards
    train, checked = sets
    length = len(train) // args.batch  # steps of an epoch
    steps = args.epochs * length
    last = job.last_step(args.steps, steps)
    sizes = {"size": args.batch, "of an epoch": length, "blocks": args.blocks, "heads": args.heads}
    peak = job.PEAK["bf16" if args.bf16 else "fp32"]
    run = job.Run(args.checkpoint, sizes, model.operations, peak, last=last)
    run.resume(model, optimizer)
    rank = mesh["replicate"].get_local_rank() * mesh["fsdp"].size() + mesh["fsdp"].get_local_rank()
    ranks = args.replicate * args.shard
    todo = job.places(len(train), args.batch, args.epochs, run.done, rank, ranks)
    todo = islice(todo, max(0, last - run.done))
    loader = job.make_loader(train, todo, WORKERS)
    # All batches have one size, so the last one is filled up with padding.
    (inputs, targets), rows = checked.tensors, (0, 0, 0, -len(checked) % args.batch)
    checked = TensorDataset(pad(inputs, rows), pad(targets, rows, value=PADDING))
    places = job.parts(len(checked), args.batch, rank, ranks)
    check_loader = job.make_loader(checked, places, WORKERS)
    for batch in loader:
        torch.manual_seed(run.done * ranks + rank)  # dropout: of each part, also resumed
        losses, tokens = compute(batch)
        scored = job.total(tokens)
        # FSDP averages over its ranks; so scaled, that is the mean over all tokens.
        norm = clip(parameters, ranks / scored)
        for group in optimizer.param_groups:
            group["lr"] = RATE * job.cosine(run.done, steps)
        optimizer.step()
        optimizer.zero_grad()
        due = run.look(losses, scored, norm, group["lr"])
        if run.done % length == 0:
            run.end_epoch(validate(model, compute, check_loader, device))
        if due or run.done == last:
            run.save(model, optimizer)
        if run.stopping:
            break
    return run


@record  # torchrun then shows this process's error, not only its exit status
def main(arguments=None):
    args = read_flags(arguments)
    sets = make_datasets()
    if args.batch > len(sets[0]):
        refuse(f"--batch {args.batch}: there are only {len(sets[0])} sequences")
    device = job.join()
    mesh = make_mesh(args, device)
    model = make_model(args, device, mesh)
    run = train(args, device, mesh, model, sets)
    run.finish()
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

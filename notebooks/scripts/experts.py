"""Train a GPT with a mixture of experts in each block: expert parallelism and FSDP, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 experts.py --ep 2
Several nodes:   sbatch train.sbatch, with experts.py --ep 2 --checkpoint "$CHECKPOINT" in it

A router sends each token to a few experts. --ep E processes, neighbours, have a part of the experts
each, and tokens travel there and back; other processes have copies. FSDP shards everything else.
It saves and ends on SIGTERM and SIGUSR1; the same command, or one with another --ep, resumes.

It needs PyTorch 2.10 or newer. No GPU has run it yet, where it computes in bf16: its losses and
gradients were compared on CPUs only."""

import argparse

import job
import torch
import torch.distributed as dist
from gpt import GPT, Block, count, make_datasets, mean_loss  # yours
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import gelu, linear

EXPERTS, TOP, BALANCE = 8, 2, 0.01  # of a block; of a token; the weight of the balancing loss
PLACES = Replicate(), Shard(0)  # of experts, on a mesh of copies x ep
EPOCHS, BATCH, WORKERS = 2, 32, 0  # batch: of all processes together; workers: per process
RATE, CLIP = 8e-3, 1.0  # the highest learning rate, the largest norm of a gradient
BF16 = job.GPU is not None


class Experts(nn.Module):
    """Experts, each two linear layers, and their router; takes and returns (batch, length, width)."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        # One tensor for all experts, in which each begins as an nn.Linear would.
        up, down = torch.empty(EXPERTS, 4 * width, width), torch.empty(EXPERTS, width, 4 * width)
        self.up = nn.Parameter(up.uniform_(-1, 1) / width**0.5)
        self.down = nn.Parameter(down.uniform_(-1, 1) / (4 * width) ** 0.5)

    def weights(self):
        return self.up, self.down

    def distribute(self, mesh):
        """Keep only this process's experts; call it before fully_shard."""
        self.group = mesh["ep"].get_group()
        parts = (distribute_tensor(whole, mesh, PLACES, src_data_rank=None) for whole in self.weights())
        self.up, self.down = map(nn.Parameter, parts)

    def forward(self, x):
        rows, ranks = x.flatten(0, 1), self.group.size()
        chances = self.router(rows).float().softmax(-1)
        weights, chosen = chances.topk(TOP)
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        leaving = torch.bincount(chosen.flatten(), minlength=EXPERTS)  # how many go to each expert
        self.balance = balancing_loss(chances, leaving)
        arriving = torch.empty_like(leaving)  # how many come from each rank to each expert of this one
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sent, received = (counts.view(ranks, -1).sum(1).tolist() for counts in (leaving, arriving))
        arrived = all_to_all_single_autograd(rows[order // TOP], received, sent, self.group)
        experts = torch.arange(EXPERTS, device=x.device) % (EXPERTS // ranks)
        computed = self.compute(arrived, experts.repeat_interleave(arriving))
        back = all_to_all_single_autograd(computed, sent, received, self.group)
        back = back[order.argsort()].unflatten(0, (-1, TOP))  # by token again
        return (back * weights[..., None]).sum(1).view_as(x).type_as(x)

    def compute(self, rows, experts):
        """Return what each row's expert makes of it."""
        order = experts.argsort(stable=True)
        # Each copy has the gradient of the tokens that came to it: their sum is the expert's gradient.
        local = (p.to_local(grad_placements=(Partial(), Shard(0))) for p in self.weights())
        ups, downs = (part.type_as(rows) for part in local)
        parts = rows[order].split(torch.bincount(experts, minlength=len(ups)).tolist())
        layers = zip(parts, ups, downs, strict=True)  # also without tokens: a gradient is then 0
        outputs = [linear(gelu(linear(part, up)), down) for part, up, down in layers]
        return torch.cat(outputs)[order.argsort()]


def balancing_loss(chances, counts):
    """Return this rank's part of: experts x the sum of (fraction of tokens x mean chance) of each.

    Fractions are of all ranks' tokens: the mean of the products of each rank would be another loss.
    """
    dist.all_reduce(counts := counts.clone())
    return EXPERTS * TOP * (counts * chances.sum(0)).sum() / counts.sum() ** 2


class MixtureBlock(Block):
    """A block whose linear layers are experts."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        del self.up, self.down
        self.experts = Experts(width)

    def mlp(self, x):
        return self.experts(x)


def make_gpt():
    model = GPT()
    model.blocks = nn.ModuleList(MixtureBlock(64, 4) for _ in model.blocks)
    return model


def make_model(device, mesh):
    with torch.device("meta"):  # shapes only: no device ever holds the whole model
        model = make_gpt()
    policy = MixedPrecisionPolicy(torch.bfloat16 if BF16 else None, torch.float32)  # float32 sums
    for block in model.blocks:
        block.experts.distribute(mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params={*block.experts.weights()})
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the rest: embedding, last norm, head
    model.to_empty(device=device)  # memory for this rank's shards
    torch.manual_seed(0)
    first = make_gpt() if dist.get_rank() == 0 else nn.Module()  # whole, on rank 0 only
    job.copy_from_rank_0(first, model)
    for block in model.blocks:
        for weight in block.experts.weights():
            # FSDP averages the gradients of the rest over all ranks; of experts they are sums.
            weight.register_hook(lambda sums: sums.redistribute(placements=PLACES) / mesh.size())
    return model


@record  # torchrun then shows this process's error, not only its exit status
def main():
    parser = argparse.ArgumentParser()
    parser.error = job.refuse
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--checkpoint", type=job.start_of, default="experts", help="how names begin")
    args = parser.parse_args()
    device = job.join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.ep < 1 or ranks % args.ep or EXPERTS % args.ep:
        job.end(f"--ep {args.ep}: must divide the {ranks} processes and the {EXPERTS} experts")
    if ranks > BATCH:
        job.end(f"a batch of {BATCH} is too small for {ranks} ranks")
    mesh = init_device_mesh(device.type, (ranks // args.ep, args.ep), mesh_dim_names=("copies", "ep"))
    model = make_model(device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)  # of the shards
    train, check = make_datasets()
    length = len(train) // BATCH  # steps of an epoch
    experts = 6 * sum(weight.numel() for block in model.blocks for weight in block.experts.weights())
    operations = model.flops_per_token() - experts * (1 - TOP / EXPERTS)  # a token meets TOP of them
    sizes = {"size": BATCH, "of an epoch": length, "top": TOP}
    run = job.Run(args.checkpoint, sizes, operations, job.PEAK["bf16" if BF16 else "fp32"])
    run.resume(model, optimizer)
    todo = job.places(len(train), BATCH, EPOCHS, run.done, rank, ranks)
    loader = job.make_loader(train, todo, WORKERS)
    check_loader = job.make_loader(check, job.parts(len(check), BATCH, rank, ranks), WORKERS)
    for batch in loader:
        scored = job.total(count(batch[1]))
        loss = model(*(tensor.to(device, non_blocking=True) for tensor in batch))
        balance = sum(block.experts.balance for block in model.blocks)
        # Each rank has its part of a mean over all tokens: to be added up, but FSDP averages.
        ((loss / scored + BALANCE * balance) * ranks).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor()  # of the whole gradient
        for group in optimizer.param_groups:
            group["lr"] = RATE * job.cosine(run.done, EPOCHS * length)
        optimizer.step()
        optimizer.zero_grad()
        due = run.look(loss.detach(), scored, norm, group["lr"])
        if run.done % length == 0:
            run.end_epoch(mean_loss(model, check_loader, device))
        if due or run.done == EPOCHS * length:
            run.save(model, optimizer)
        if run.stopping:
            break
    run.finish()
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()

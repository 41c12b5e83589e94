"""Expert parallelism by hand: a mixture of experts, one expert per rank, whose tokens travel there and back.

    torchrun --standalone --nproc-per-node=2 notebooks/labs/expert_parallel.py

Outputs and gradients are those of one device that has all experts. No notebook shows it yet.
"""

import torch
import torch.distributed as dist
from torch import nn

CLOSE = 2e-6  # the sums are added up in another order


class Exchange(torch.autograd.Function):
    """Send `sent[r]` rows to each rank r and receive `received[r]` from it; gradients travel back the same way."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        return exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, ctx.received, ctx.sent), None, None


def exchanged(rows, sent, received):
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived


def mixture(x, router, expert):
    """Return each token's output; x are this rank's tokens (tokens, width), `expert` is this rank's."""
    chance, chosen = router(x).softmax(-1).max(-1)  # of each token: its expert, and how much it counts
    order = chosen.argsort(stable=True)  # so that an expert's tokens are neighbours
    sent = torch.bincount(chosen, minlength=dist.get_world_size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)  # first the numbers: every rank has to know what will arrive
    sent, received = sent.tolist(), received.tolist()
    outputs = expert(Exchange.apply(x[order], sent, received))
    back = Exchange.apply(outputs, received, sent)
    return chance[:, None] * torch.empty_like(back).index_copy(0, order, back)


def whole_mixture(x, router, experts):
    """Return the same on one device, which has all experts."""
    chance, chosen = router(x).softmax(-1).max(-1)
    rows = [experts[number](row) for number, row in zip(chosen.tolist(), x, strict=True)]
    return chance[:, None] * torch.stack(rows)


def compare() -> dict:
    """Return the largest differences from one device: of outputs, and of the gradients of tokens, router and expert."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    experts, router = nn.ModuleList(nn.Linear(8, 8) for _ in range(world)), nn.Linear(8, world)
    x = torch.randn(32, 8, requires_grad=True)
    expected = whole_mixture(x, router, experts)
    (expected.square().sum() / len(x)).backward()
    wanted = [expected, x.grad, router.weight.grad, experts[rank].weight.grad]
    for module in (experts, router):
        module.zero_grad()  # sets them to None, so those above are kept
    part = x.detach().chunk(world)[rank].requires_grad_()
    output = mixture(part, router, experts[rank])
    (output.square().sum() / len(x)).backward()
    dist.all_reduce(router.weight.grad)  # every rank has the router, like a model in DDP; experts need none
    found = [output, part.grad, router.weight.grad, experts[rank].weight.grad]
    wanted[:2] = [whole.chunk(world)[rank] for whole in wanted[:2]]
    names = ("output", "tokens", "router", "expert")
    pairs = zip(names, found, wanted, strict=True)
    return {name: (a - b).abs().max().item() for name, a, b in pairs}


def main():
    dist.init_process_group("gloo")
    found = compare()
    print(f"rank {dist.get_rank()}: {found}", flush=True)
    assert max(found.values()) < CLOSE
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
